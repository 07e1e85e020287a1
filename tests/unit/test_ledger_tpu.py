"""The ledger of what libtpu compiles: combined reductions, fused reduce-scatters, async pairs.

`v5e_2x4_stage2_bf16.txt` is cut out of the program that libtpu 0.0.21 made of the contract GPT at
width 512 (tests/explain/golden.py): what the collectives read stands as inputs.
`tpu7x_2x2x1_stage2_bf16.txt` is what libtpu 0.0.50 made of two linear layers of 4096 and 512 on
JAX; cut to what the readers read (layouts and most of the configurations are gone).
`tpu7x_2x2x1_aside.txt` is one reduce-scatter of three linear layers as libtpu 0.0.52 spells it.
"""

from pathlib import Path

import pytest

from spmdzero.hlo import read_schedule
from spmdzero.inspect import CollectiveLedger

pytestmark = pytest.mark.backends("any")

DATA = Path(__file__).parents[1] / "data/hlo"


def ledger(name: str) -> CollectiveLedger:
    return CollectiveLedger.from_hlo((DATA / name).read_text())


def test_what_a_sparse_core_moves_is_a_tensors_and_runs_beside_the_rest() -> None:
    # The program's outputs begin with the new parameters.
    parameters = [f"parameter/{n}" for n in ("down.bias", "up.bias", "up.weight", "down.weight")]
    text = (DATA / "tpu7x_2x2x1_stage2_bf16.txt").read_text()
    tpu7x = CollectiveLedger.from_hlo(text, outputs=[*parameters, *[""] * 20])
    moved = {(c.role, c.kind, c.tensor): c for c in tpu7x.collectives if c.asynchronous}
    matrices = {
        (kind, name) for kind in ("reduce-scatter", "all-gather") for name in ("up", "down")
    }
    assert set(moved) == {
        ("gradient" if kind == "reduce-scatter" else "parameter", kind, f"{name}.weight")
        for kind, name in matrices
    } | {("parameter", "all-gather", "down.bias")}
    for (_, kind, name), c in moved.items():
        whole = 4096 if name == "down.bias" else 4096 * 512
        assert (c.dtype, c.bytes, c.group_size) == ("bf16", 2 * whole, 8), kind
    assert tpu7x.activations == ()
    whole = {(c.role, c.tensor) for c in tpu7x.collectives if c.kind == "all-reduce"}
    assert {("gradient", "down.bias"), ("norm", "global"), ("output", "loss")} <= whole


def test_one_fusion_scatters_three_named_gradients_and_one_sum_names_each_of_its_vectors():
    v5e = ledger("v5e_2x4_stage2_bf16.txt")
    scattered = {c.tensor: c for c in v5e.collectives if c.kind == "reduce-scatter"}
    assert {name: (c.role, c.shape, c.bytes) for name, c in scattered.items()} == {
        "h.1.mlp.c_fc.weight": ("gradient", (2048, 512), 2 * 2048 * 512),
        "h.1.mlp.c_proj.weight": ("gradient", (512, 2048), 2 * 512 * 2048),
        "lm_head.weight": ("gradient", (1024, 512), 2 * 1024 * 512),
    }
    assert all(c.scattered and c.dtype == "bf16" for c in scattered.values())
    reduced = [c.tensor for c in v5e.collectives if c.kind == "all-reduce"]
    assert len(reduced) == len(set(reduced)) == 18
    assert {"h.0.ln_1.weight", "h.1.mlp.c_fc.bias", "ln_f.bias"} <= set(reduced)
    assert v5e.activations == ()
    assert not any(c.asynchronous for c in v5e.collectives)


def test_the_end_of_an_async_pair_names_what_its_start_moves():
    pairs = {(c.role, c.tensor): c for c in ledger("async_pairs.txt").collectives}
    assert {key: (c.kind, c.bytes) for key, c in pairs.items()} == {
        ("gradient", "wte.weight"): ("reduce-scatter", 64 * 128 * 2),
        ("parameter", "wte.weight"): ("all-gather", 64 * 128 * 2),
        ("gradient", "ln.weight"): ("all-reduce", 512 * 2),
        ("gradient", "ln.bias"): ("all-reduce", 256 * 2),
    }
    assert all(c.asynchronous for c in pairs.values())
    # The source line is that of the named tensor.
    assert pairs["gradient", "wte.weight"].source == "model.py:12"
    assert pairs["gradient", "ln.bias"].source == ""


PARTS = """\
HloModule parts, num_partitions=8

ENTRY %main (shard: bf16[512,1024]) -> (bf16[4096,1024]) {
  %shard = bf16[512,1024]{1,0} parameter(0)
  %whole = bf16[4096,1024] all-gather(%shard), replica_groups={}, dimensions={0}, NAMED
  %flat = s8[8388608]{0} bitcast(%whole)
  %start.0 = ((s8[8388608]{0}), s8[4194304]{0}, s32[]) slice-start(%flat), slice={[0:4194304]}
  %start.1 = ((s8[8388608]{0}), s8[4194304]{0}, s32[]) slice-start(%flat), slice={[4194304:8388608]}
  %done.0 = s8[4194304]{0} slice-done(%start.0)
  %done.1 = s8[4194304]{0} slice-done(%start.1)
  %joined = bf16[4096,1024]{1,0} custom-call(%done.0, %done.1), custom_call_target="ConcatBitcast"
  ROOT %out = (bf16[4096,1024]{1,0}) tuple(%joined)
}
""".replace("NAMED", 'metadata={op_name="jit(run)/aten___to_copy/convert_element_type"}')


def test_a_parameter_that_is_gathered_and_copied_in_parts_is_no_leak() -> None:
    """As libtpu 0.0.50 copies matrices of 8 MB on tpu7x."""
    (moved,) = CollectiveLedger.from_hlo(PARTS, outputs=["parameter/up.weight"]).collectives
    assert (moved.role, moved.tensor, moved.group_size) == ("parameter", "up.weight", 8)
    # An output of the model is a leak, as are values that the step keeps nothing of.
    (moved,) = CollectiveLedger.from_hlo(PARTS, outputs=["output/logits"]).collectives
    assert moved.role == ""


@pytest.mark.parametrize("call", ["call", "custom-call"])
def test_what_a_sparse_core_moves_is_read_in_the_spelling_of_each_libtpu(call: str) -> None:
    text = (DATA / "tpu7x_2x2x1_aside.txt").read_text()
    for part in ("start", "update", "done"):
        text = text.replace(f" custom-call-{part}(", f" {call}-{part}(")
    (moved,) = CollectiveLedger.from_hlo(text).collectives
    assert (moved.role, moved.kind, moved.tensor) == ("gradient", "reduce-scatter", "last.weight")
    assert (moved.bytes, moved.group_size, moved.asynchronous) == (2 * 1024**2, 8, True)
    start, ends = {}, []
    for operation in read_schedule(text):
        if operation.asynchronous and operation.wire_bytes:
            start[operation.name] = operation.wire_bytes
        ends.append(operation.ends)
    # It starts where its operand is named.
    assert start == {"update": 2 * 1024**2 * 7 // 8}
    assert "update" in ends


SHIFTED = """\
HloModule shifted, num_partitions=16

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (first: bf16[264,64]) -> (f32[], f32[68,64]) {
  %first = bf16[264,64]{1,0} parameter(0)
  %rows = bf16[8,64]{1,0} slice(%first), slice={[256:264], [0:64]}
  %start = (bf16[8,64], bf16[8,64], u32[]) collective-permute-start(%rows), source_target_pairs=\
{{0,4},{4,8},{8,12},{1,5},{5,9},{9,13}}
  %done = bf16[8,64]{1,0} collective-permute-done(%start)
  %joined = bf16[272,64]{1,0} concatenate(%done, %first), dimensions={0}
  %second = bf16[68,64]{1,0} reduce-scatter(%joined), replica_groups=\
{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, dimensions={0}, to_apply=%add
  %wide = f32[68,64]{1,0} convert(%second), metadata={op_name="jit(run)/zero.norm/global.0/convert"}
  %norm = f32[] reduce(%wide, %wide), metadata={op_name="jit(run)/zero.norm/global.0/reduce_sum"}
  %new = f32[68,64]{1,0} negate(%wide), metadata={op_name="jit(run)/zero.update/w.0/neg"}
  ROOT %out = (f32[], f32[68,64]{1,0}) tuple(%norm, %new)
}
"""


def test_rows_that_are_shifted_between_two_steps_of_a_sum_are_of_its_gradient() -> None:
    """As libtpu 0.0.21 does on v5e:4x4 with a Llama's gradients; such rows have no name."""
    ledger = CollectiveLedger.from_hlo(SHIFTED)
    found = {c.kind: (c.role, c.tensor) for c in ledger.collectives}
    assert found == dict.fromkeys(("collective-permute", "reduce-scatter"), ("gradient", "w"))


SLICES = """\
HloModule slices, num_partitions=4, input_output_alias={ {0}: (1, {}, may-alias), \
{1}: (2, {}, may-alias), {2}: (0, {}, may-alias) }

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%stacked (one: bf16[1,8,64], two: bf16[1,8,64]) -> bf16[2,8,64] {
  %one = bf16[1,8,64] parameter(0)
  %two = bf16[1,8,64] parameter(1)
  %low = bf16[] constant(-inf)
  %pad.1 = bf16[2,8,64] pad(%one, %low), padding=0_1x0_0x0_0
  %pad.2 = bf16[2,8,64] pad(%two, %low), padding=1_0x0_0x0_0
  ROOT %both = bf16[2,8,64] maximum(%pad.1, %pad.2)
}

%body (state: (s32[], bf16[2,8,64], bf16[2,16,64])) -> (s32[], bf16[2,8,64], bf16[2,16,64]) {
  %state = (s32[], bf16[2,8,64], bf16[2,16,64]) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %stack = bf16[2,8,64] get-tuple-element(%state), index=1
  %sums = bf16[2,16,64] get-tuple-element(%state), index=2
  %zero = s32[] constant(0)
  %own = bf16[1,8,64] dynamic-slice(%stack, %turn, %zero, %zero), dynamic_slice_sizes={1,8,64}
  %begin = token[] after-all()
  %sent = (bf16[1,8,64], u32[], token[]) send(%own, %begin), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0"}
  %received = (bf16[2,8,64], u32[], token[]) recv(%begin), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-gather.1_0"}
  %came = (bf16[2,8,64], token[]) recv-done(%received), channel_id=2
  %parts = bf16[2,8,64] get-tuple-element(%came), index=0
  %whole = bf16[2,16,64] all-gather(%parts), replica_groups={{0,1},{2,3}}, dimensions={1}
  %squared = bf16[2,16,64] multiply(%whole, %sums)
  ROOT %next = (s32[], bf16[2,8,64], bf16[2,16,64]) tuple(%turn, %stack, %squared)
}

%condition (state: (s32[], bf16[2,8,64], bf16[2,16,64])) -> pred[] {
  %state = (s32[], bf16[2,8,64], bf16[2,16,64]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (head: bf16[16,64], one: bf16[1,8,64], two: bf16[1,8,64], made: bf16[32,64]) -> (\
bf16[1,8,64], bf16[1,8,64], f32[16,64]) {
  %head = bf16[16,64]{1,0} parameter(0)
  %one = bf16[1,8,64] parameter(1)
  %two = bf16[1,8,64] parameter(2)
  %made = bf16[32,64] parameter(3)
  %both = bf16[2,8,64] fusion(%one, %two), kind=kLoop, calls=%stacked
  %start = s32[] constant(0)
  %blank = bf16[2,16,64] constant({...})
  %first = (s32[], bf16[2,8,64], bf16[2,16,64]) tuple(%start, %both, %blank)
  %last = (s32[], bf16[2,8,64], bf16[2,16,64]) while(%first), condition=%condition, body=%body
  %part = bf16[16,64]{1,0} reduce-scatter(%made), replica_groups={{0,1},{2,3}}, dimensions={0}, \
to_apply=%add
  %begin = token[] after-all()
  %sent = (bf16[16,64], u32[], token[]) send(%part, %begin), channel_id=3, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.2_3"}
  %received = (bf16[16,64], u32[], token[]) recv(%begin), channel_id=4, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.2_3"}
  %came = (bf16[16,64], token[]) recv-done(%received), channel_id=4
  %sum = bf16[16,64] get-tuple-element(%came), index=0
  %whole = bf16[32,64] all-gather(%head), replica_groups={{0,1},{2,3}}, dimensions={0}
  %new = f32[16,64]{1,0} negate(%sum), metadata={op_name="jit(run)/zero.update/head.weight.0/neg"}
  ROOT %out = (bf16[1,8,64], bf16[1,8,64], f32[16,64]) tuple(%one, %two, %new)
}
"""


def test_between_slices_what_is_sent_and_received_has_the_name_of_the_input_and_of_the_update() -> (
    None
):
    """As libtpu 0.0.21 does over two slices: it keeps no collective's name."""
    outputs = [f"parameter/{n}.weight" for n in ("blocks.0.up", "blocks.1.up", "head")]
    found = CollectiveLedger.from_hlo(SLICES, outputs=outputs).collectives
    assert [(c.kind, c.role, c.tensor) for c in found] == [
        ("all-gather", "parameter", "blocks.*.up.weight"),
        ("reduce-scatter", "gradient", "head.weight"),
        ("all-gather", "parameter", "head.weight"),
    ]
