"""The collective ledger, read from what compilers print and from what an engine ran.

What an engine's programs hold at each stage is in tests/engine/test_compiled_program.py.
"""

import json
from dataclasses import replace

import pytest
import torch

import spmdzero
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import Collective, CollectiveLedger, peak_temporary_bytes

pytestmark = pytest.mark.backends("any")


def by_tensor(collectives: tuple[Collective, ...]) -> dict[str, Collective]:
    named = {c.tensor: c for c in collectives}
    assert len(named) == len(collectives)
    return named


class Squares(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def test_reduce_scatter_and_gather_move_the_floor_and_all_reduce_half_as_much_again():
    rows, columns, devices = 32, 16, 8
    psi = rows * columns + rows

    def sent(reduction: str) -> int:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
            "spmd": {"reduction": reduction, "min_shard_elements": 0},
        }
        engine, *_ = spmdzero.initialize(model=Squares(columns, rows), config=config)
        with spmdzero.record_ledgers(engine) as ledgers:
            engine.train_batch(iter([torch.ones(devices, columns)]))
        moved = [c for c in ledgers.boundary.collectives if c.role in ("gradient", "parameter")]
        # Of the unsharded side: both tensors whole, and gathered whole.
        assert sum(c.bytes for c in moved) == 2 * 4 * psi
        assert all(c.group_size == devices and not c.in_loop for c in moved)
        return sum(c.wire_bytes for c in moved)

    # ZeRO, arXiv 1910.02054, section 7.1: a reduce-scatter and an all-gather of Ψ elements.
    floor = 2 * 4 * psi * (devices - 1) // devices
    assert sent("explicit") == floor
    assert sent("annotated") == floor * 3 // 2


def test_without_metadata_nothing_is_called_a_leak():
    with pytest.raises(SpmdZeroUsageError, match="no op_name metadata"):
        _ = CollectiveLedger.from_hlo(LOOP).activations


# What libtpu prints: layouts with tiles, iota replica groups, a fusion around the reduction that
# combines two tensors under the metadata of one, an asynchronous gather, a sum sliced by a value
# that is not the device's index, and a sum that is sliced but also read whole.
TPU = """\
HloModule step, is_scheduled=true, num_partitions=8, input_output_alias={ {0}: (0, {}, may-alias)}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  %y = bf16[]{:T(256)} parameter(1)
  ROOT %sum = bf16[]{:T(256)} add(%x, %y)
}

%all-reduce-scatter.1 (p0: bf16[64,128], p1: bf16[128]) -> (bf16[8,128], bf16[16]) {
  %p0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[128]{0:T(256)(128)(2,1)} parameter(1)
  %all-reduce.5 = (bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128]{0:T(256)(128)(2,1)}) all-reduce(bf16[64,128]{1,0:T(8,128)(2,1)} %p0, bf16[128]{0:T(256)(128)(2,1)} %p1), channel_id=7, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add, metadata={op_name="zero.gradient/w.12/aten__sum"}
  %gte.0 = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.5), index=0
  %gte.1 = bf16[128]{0:T(256)(128)(2,1)} get-tuple-element(%all-reduce.5), index=1
  %id = u32[]{:T(128)} partition-id()
  %zero = u32[]{:T(128)} constant(0)
  %slice.0 = bf16[8,128]{1,0:T(8,128)(2,1)} dynamic-slice(%gte.0, %id, %zero), dynamic_slice_sizes={8,128}, metadata={op_name="zero.gradient/w.12/aten__sum"}
  %slice.1 = bf16[16]{0:T(256)(128)(2,1)} dynamic-slice(%gte.1, %id), dynamic_slice_sizes={16}, metadata={op_name="zero.gradient/b.13/aten__sum"}
  ROOT %tuple.1 = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[16]{0:T(256)(128)(2,1)}) tuple(%slice.0, %slice.1)
}

ENTRY %main (w: bf16[64,128], b: bf16[128], i: s32[]) -> (bf16[64,128], bf16[16], bf16[16], bf16[128]) {
  %w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[128]{0:T(256)(128)(2,1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %fusion.9 = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[16]{0:T(256)(128)(2,1)}) fusion(%w, %b), kind=kCustom, calls=%all-reduce-scatter.1
  %shard.0 = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%fusion.9), index=0
  %shard.1 = bf16[16]{0:T(256)(128)(2,1)} get-tuple-element(%fusion.9), index=1
  %all-gather-start.3 = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}) all-gather-start(%shard.0), channel_id=8, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true, metadata={op_name="zero.parameter/w.20/xla__custom_sharding"}
  %all-gather-done.3 = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather-done(%all-gather-start.3), metadata={op_name="zero.parameter/w.20/xla__custom_sharding"}
  %all-reduce.8 = bf16[128]{0:T(256)(128)(2,1)} all-reduce(%b), channel_id=9, replica_groups={}, to_apply=%add
  %looked-up = bf16[16]{0:T(256)(128)(2,1)} dynamic-slice(%all-reduce.8, %i), dynamic_slice_sizes={16}
  %all-reduce.9 = bf16[128]{0:T(256)(128)(2,1)} all-reduce(%b), channel_id=10, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %device = u32[]{:T(128)} partition-id()
  %own = bf16[16]{0:T(256)(128)(2,1)} dynamic-slice(%all-reduce.9, %device), dynamic_slice_sizes={16}
  %permute = bf16[16]{0:T(256)(128)(2,1)} collective-permute(%own), channel_id=11, source_target_pairs={{0,1},{1,0}}
  ROOT %out = (bf16[64,128], bf16[16], bf16[16], bf16[128]) tuple(%all-gather-done.3, %looked-up, %permute, %all-reduce.9)
}
"""  # noqa: E501


# A sum that leaves a fusion scaled before its slice, in a loop that may also carry it whole.
LOOP = """\
HloModule loop, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%scale (p0: f32[16]) -> f32[16] {
  %p0 = f32[16]{0} parameter(0)
  ROOT %twice = f32[16]{0} add(%p0, %p0)
}

%body (state: (f32[16], f32[4])) -> (f32[16], f32[4]) {
  %state = (f32[16]{0}, f32[4]{0}) parameter(0)
  %g = f32[16]{0} get-tuple-element(%state), index=0
  %all-reduce = f32[16]{0} all-reduce(%g), replica_groups={}, to_apply=%add
  %scaled = f32[16]{0} fusion(%all-reduce), kind=kLoop, calls=%scale
  %id = u32[] partition-id()
  %own = f32[4]{0} dynamic-slice(%scaled, %id), dynamic_slice_sizes={4}
  ROOT %next = (f32[16]{0}, f32[4]{0}) tuple(%g, %own)
}

%more (state: (f32[16], f32[4])) -> pred[] {
  %state = (f32[16]{0}, f32[4]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (g: f32[16], s: f32[4]) -> (f32[16], f32[4]) {
  %g = f32[16]{0} parameter(0)
  %s = f32[4]{0} parameter(1)
  %start = (f32[16]{0}, f32[4]{0}) tuple(%g, %s)
  ROOT %while = (f32[16]{0}, f32[4]{0}) while(%start), condition=%more, body=%body
}
"""


# What libtpu makes of a counter of 64 bits, which a chip has as two words: it is below 5 where the
# upper one is negative, or zero and the lower one is below 5.
OF_TWO_WORDS = """\
  %state = (f32[16]{0}, f32[4]{0}, u32[], u32[]) parameter(0)
  %none = s32[] constant(0)
  %zero = u32[] constant(0)
  %end = u32[] constant(5)
  %upper = u32[] get-tuple-element(%state), index=3
  %signed = s32[] bitcast-convert(%upper)
  %negative = pred[] compare(%signed, %none), direction=LT
  %small = pred[] compare(%upper, %zero), direction=EQ
  %lower = u32[] get-tuple-element(%state), index=2
  %below = pred[] compare(%lower, %end), direction=LT
  %both = pred[] and(%small, %below)
  ROOT %more = pred[] or(%negative, %both)
"""


def test_a_counter_of_two_words_tells_how_often_a_loop_turns() -> None:
    body = "  %state = (f32[16]{0}, f32[4]{0}) parameter(0)\n  ROOT %true = pred[] constant(true)\n"
    assert body in LOOP
    text = LOOP.replace(body, OF_TWO_WORDS)
    zeros = "  %word = u32[] constant(0)\n"
    start = "  %start = (f32[16]{0}, f32[4]{0}) tuple(%g, %s)"
    text = text.replace(start, f"{zeros}  %start = (f32[16]{{0}}, f32[4]{{0}}, u32[], u32[]) "
                        "tuple(%g, %s, %word, %word)")  # fmt: skip
    (total,) = CollectiveLedger.from_hlo(text).collectives
    assert total.turns == 5


@pytest.mark.parametrize(("carried", "scattered"), [("%g", True), ("%all-reduce", False)])
def test_sum_that_a_loop_carries_whole_is_not_scattered(carried, scattered):
    text = LOOP.replace("tuple(%g, %own)", f"tuple({carried}, %own)")
    (total,) = CollectiveLedger.from_hlo(text).collectives
    assert (total.in_loop, total.scattered) == (True, scattered)


def test_a_loop_moves_at_each_turn_and_turns_in_the_memory_that_it_begins_with() -> None:
    told = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    text = LOOP.replace("body=%body", told)
    ledger = CollectiveLedger.from_hlo(text)
    (total,) = ledger.collectives
    assert (total.turns, total.bytes, ledger.bytes) == (3, 64, 192)
    assert ledger.wire_bytes == 3 * total.wire_bytes
    assert ledger.by_kind() == {"all-reduce": 3}
    # The sum and its double, never the tuple again.
    assert peak_temporary_bytes(text) == 64 + 64


@pytest.fixture
def tpu() -> CollectiveLedger:
    return CollectiveLedger.from_hlo(TPU)


def test_libtpu_fusion_is_a_reduce_scatter_of_each_tensor_that_it_combines(tpu):
    gradients = by_tensor(tpu.of_role("gradient"))
    assert {name: (c.kind, c.dtype, c.shape) for name, c in gradients.items()} == {
        "w": ("reduce-scatter", "bf16", (64, 128)),
        "b": ("reduce-scatter", "bf16", (128,)),
    }
    assert all(c.scattered for c in gradients.values())
    assert gradients["b"].wire_bytes == 2 * 128 * 7 // 8


def test_asynchronous_gather_counts_once_with_its_group_and_its_output(tpu):
    (gather,) = tpu.of_role("parameter")
    assert gather.group_size == 4
    # Eight rows from each of four devices, two bytes each element.
    assert (gather.shape, gather.bytes) == ((32, 128), 2 * 32 * 128)


def test_slice_at_another_index_or_beside_a_whole_read_is_not_scattered(tpu):
    sums = [c for c in tpu.activations if c.kind == "all-reduce"]
    assert [(c.group_size, c.scattered) for c in sums] == [(8, False), (2, False)]


def test_sum_read_only_through_the_own_slice_is_scattered():
    text = TPU.replace("%permute, %all-reduce.9)", "%permute, %b)")
    sums = [c for c in CollectiveLedger.from_hlo(text).activations if c.kind == "all-reduce"]
    assert [c.scattered for c in sums] == [False, True]


def test_tensor_of_a_combined_collective_is_left_open_when_nothing_tells_it():
    text = TPU.replace(', metadata={op_name="zero.gradient/b.13/aten__sum"}', "")
    assert {c.tensor for c in CollectiveLedger.from_hlo(text).of_role("gradient")} == {"w", ""}


def test_donated_inputs_are_counted_in_the_header_unless_the_caller_counted_them(tpu):
    assert (tpu.aliased, tpu.parameters) == (1, 3)
    assert CollectiveLedger.from_hlo(TPU, aliased=0).aliased == 0


def test_kinds_and_totals_cover_every_collective(tpu):
    assert tpu.by_kind() == {
        "reduce-scatter": 2,
        "all-gather": 1,
        "all-reduce": 2,
        "collective-permute": 1,
    }
    (permute,) = (c for c in tpu.collectives if c.kind == "collective-permute")
    assert (permute.wire_bytes, permute.group_size) == (permute.bytes, 2)
    assert tpu.bytes == sum(c.bytes for c in tpu.collectives)
    assert tpu.wire_bytes == sum(c.wire_bytes for c in tpu.collectives)


TAGS = {
    "zero.gradient/4.bias.127/aten__sum": ("gradient", "4.bias"),
    "zero.parameter/0.weight.32/aten__add.2/aten__add": ("parameter", "0.weight"),
    "zero.loss.10/aten__mse_loss": ("loss", ""),
    "outer.1/zero.loss.10/zero.norm.2/aten__sum": ("norm", ""),
    "zero.parameter/blocks.0.1.7/aten__add": ("parameter", "blocks.0.1"),
    "nonzero.gradient/x.1/aten__sum": ("", ""),
    "zero.3/conv.5/aten__sum": ("", ""),
}


def test_tag_is_the_innermost_scope_without_its_number():
    for op_name, expected in TAGS.items():
        text = TPU.replace("zero.parameter/w.20/xla__custom_sharding", op_name)
        ledger = CollectiveLedger.from_hlo(text)
        (gather,) = (c for c in ledger.collectives if c.kind == "all-gather")
        assert (gather.role, gather.tensor, gather.op_name) == (*expected, op_name)


def test_collective_of_an_asked_for_output_is_named_by_that_output():
    text = TPU.replace("zero.parameter/w.20/xla__custom_sharding", "jit(run)/sharding_constraint")
    for outputs, expected in ((("parameter/w", "", "", ""), ("parameter", "w")), ((), ("", ""))):
        ledger = CollectiveLedger.from_hlo(text, outputs=outputs)
        (gather,) = (c for c in ledger.collectives if c.kind == "all-gather")
        assert (gather.role, gather.tensor) == expected


def test_bytes_follow_the_element_type():
    for dtype, size in {"f32": 4, "f8e4m3fn": 1, "pred": 1, "s4": 0.5, "c64": 8}.items():
        ledger = CollectiveLedger.from_hlo(TPU.replace("bf16[", f"{dtype}["))
        assert by_tensor(ledger.of_role("gradient"))["b"].bytes == 128 * size, dtype


def test_json_holds_every_field(tpu):
    loaded = json.loads(tpu.to_json())
    rebuilt = [Collective(**{**c, "shape": tuple(c["shape"])}) for c in loaded["collectives"]]
    assert replace(tpu, **{**loaded, "collectives": tuple(rebuilt)}) == tpu


def test_text_that_is_no_whole_module_is_refused():
    with pytest.raises(SpmdZeroUsageError, match="not one HLO module"):
        CollectiveLedger.from_hlo("func.func @main() {\n}\n")
    with pytest.raises(SpmdZeroUsageError, match=r"%all-reduce\.8 spans"):
        CollectiveLedger.from_hlo(TPU.replace("num_partitions=8, ", ""))
