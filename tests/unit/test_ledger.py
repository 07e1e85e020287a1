"""The collective ledger, read from programs that the compiler in use really produced.

Run as a script with a directory, this file compiles and runs the programs on four virtual CPU
devices and writes one executed HLO module for each; the tests do that once, in a subprocess.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import Collective, CollectiveLedger
from tests.support.processes import environment

DEVICES, ROWS, COLUMNS = 4, 32, 16
WEIGHT, BIAS = 4 * ROWS * COLUMNS, 4 * ROWS  # bytes of the fp32 layer that the programs train


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Program name -> the optimised HLO that ran; ``aliased`` -> the runtime's own counts."""
    folder = tmp_path_factory.mktemp("hlo")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {path.stem: path.read_text() for path in folder.glob("*.txt")}


@pytest.fixture
def annotated(programs: dict[str, str]) -> CollectiveLedger:
    return CollectiveLedger.from_hlo(programs["annotated"])


def by_tensor(collectives: tuple[Collective, ...]) -> dict[str, Collective]:
    named = {c.tensor: c for c in collectives}
    assert len(named) == len(collectives)
    return named


def test_annotated_gradient_is_an_all_reduce_of_which_each_device_keeps_its_part(annotated):
    gradients = by_tensor(annotated.of_role("gradient"))
    assert {name: (c.kind, c.bytes) for name, c in gradients.items()} == {
        "weight": ("all-reduce", WEIGHT),
        "bias": ("all-reduce", BIAS),
    }
    assert all(c.scattered and c.group_size == DEVICES for c in gradients.values())


def test_updated_parameter_is_gathered_whole_and_named(annotated):
    gathers = by_tensor(annotated.of_role("parameter"))
    assert {name: (c.kind, c.shape, c.bytes) for name, c in gathers.items()} == {
        "weight": ("all-gather", (ROWS, COLUMNS), WEIGHT),
        "bias": ("all-gather", (ROWS,), BIAS),
    }


def test_loss_and_norm_are_scalars_that_every_device_keeps(annotated):
    scalars = annotated.of_role("loss") + annotated.of_role("norm")
    assert {c.role for c in scalars} == {"loss", "norm"}
    assert all((c.kind, c.shape, c.scattered) == ("all-reduce", (), False) for c in scalars)


def test_step_without_a_leak_has_no_activation(annotated):
    assert annotated.activations == ()
    assert not any(c.in_loop for c in annotated.collectives)


def test_donated_inputs_are_the_ones_that_the_runtime_aliased(programs):
    counted = json.loads(programs["aliased"])
    for program in ("annotated", "explicit", "replicated"):
        ledger = CollectiveLedger.from_hlo(programs[program])
        # weight, bias and a momentum for each are updated in place.
        assert ledger.aliased == counted[program] == 4
        assert ledger.parameters > ledger.aliased
    # The caller's own count wins over the header.
    assert CollectiveLedger.from_hlo(programs["annotated"], aliased=0).aliased == 0


def test_explicit_reduce_scatter_counts_its_unsharded_side(programs):
    gradients = by_tensor(CollectiveLedger.from_hlo(programs["explicit"]).of_role("gradient"))
    assert {name: (c.kind, c.shape, c.bytes, c.scattered) for name, c in gradients.items()} == {
        "weight": ("reduce-scatter", (ROWS, COLUMNS), WEIGHT, True),
        "bias": ("reduce-scatter", (ROWS,), BIAS, True),
    }


def test_reduce_scatter_and_gather_move_the_floor_and_all_reduce_half_as_much_again(programs):
    def wire(program: str) -> int:
        ledger = CollectiveLedger.from_hlo(programs[program])
        return sum(c.wire_bytes for c in ledger.collectives if c.role in ("gradient", "parameter"))

    # ZeRO, arXiv 1910.02054, section 7.1: a reduce-scatter and an all-gather of Ψ elements.
    floor = 2 * (WEIGHT + BIAS) * (DEVICES - 1) // DEVICES
    assert wire("explicit") == floor
    assert wire("annotated") == floor * 3 // 2


def test_stage0_all_reduce_is_not_scattered(programs):
    gradients = CollectiveLedger.from_hlo(programs["replicated"]).of_role("gradient")
    assert [(c.kind, c.scattered) for c in gradients] == [("all-reduce", False)] * 2


def test_layer_norm_by_propagation_leaks_the_whole_batch(programs):
    (leak,) = CollectiveLedger.from_hlo(programs["leak"]).activations
    batch, seq, width = 8, 4, 16
    assert (leak.kind, leak.bytes) == ("all-gather", 4 * batch * seq * width)
    assert "norm" in leak.op_name


def test_collectives_of_gradient_accumulation_run_in_a_loop(programs):
    ledger = CollectiveLedger.from_hlo(programs["loop"])
    assert {c.shape for c in ledger.collectives if c.in_loop} == {(), (COLUMNS, COLUMNS)}


def test_without_metadata_nothing_is_called_a_leak(programs):
    # The loop program was compiled without IR debug.
    ledger = CollectiveLedger.from_hlo(programs["loop"])
    with pytest.raises(SpmdZeroUsageError, match="no op_name metadata"):
        _ = ledger.activations


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


@pytest.mark.parametrize(("carried", "scattered"), [("%g", True), ("%all-reduce", False)])
def test_sum_that_a_loop_carries_whole_is_not_scattered(carried, scattered):
    text = LOOP.replace("tuple(%g, %own)", f"tuple({carried}, %own)")
    (total,) = CollectiveLedger.from_hlo(text).collectives
    assert (total.in_loop, total.scattered) == (True, scattered)


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


def compile_programs(folder: Path) -> None:
    """Run each program and write the HLO that it executed to ``folder``."""
    dump = folder / "dump"
    os.environ |= {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(DEVICES),
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    }
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime
    from torch.nn import functional as F
    from torch_xla.experimental.gradient_accumulation import gradient_accumulation

    runtime.use_spmd()
    backend, device = torch_xla._XLAC, torch_xla.device()
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES,), ("fsdp",))
    aliased: dict[str, int] = {}

    def mark(tensor, *spec):
        spec += (None,) * (tensor.dim() - len(spec))
        backend._xla_mark_sharding(tensor, mesh.get_op_sharding(spec))
        return tensor

    @contextlib.contextmanager
    def tag(name):
        scope = backend.profiler.scope_pusher(name)
        yield
        del scope

    def settle():
        torch_xla.sync()
        xm.wait_device_ops()

    def executed(name):
        before = set(dump.glob("*cpu_after_optimizations.txt"))
        settle()
        (text,) = set(dump.glob("*cpu_after_optimizations.txt")) - before
        (folder / f"{name}.txt").write_text(text.read_text())
        # Absent until the first compilation that aliases, then one sample for each compilation.
        counts = metrics.metric_data("InputOutputAliasCount")
        aliased[name] = int(counts[2][-1][1]) if counts else 0

    def leave(partial, spec, shape):
        partial = partial.clone()
        manual = backend.OpSharding([], [], [], spmd.ShardingType.MANUAL)
        backend._mark_manual_sharding(partial, manual)
        sharding = mesh.get_op_sharding(spec + (None,) * (len(shape) - len(spec)))
        return backend._spmd_shard_to_full_shape(partial, sharding, shape, partial.dtype)

    def enter(tensor, *spec):
        return backend._spmd_full_to_shard_shape(mark(tensor.clone(), *spec))

    def train(name, reduced):
        layer = torch.nn.Linear(COLUMNS, ROWS).to(device)
        params = {k: mark(p.detach()) for k, p in layer.named_parameters()}
        moments = {k: mark(torch.zeros(p.shape, device=device), "fsdp") for k, p in params.items()}
        x = mark(torch.randn(2 * DEVICES, COLUMNS).to(device), "fsdp")
        settle()
        local = {k: enter(p).requires_grad_() for k, p in params.items()}
        rows = F.linear(enter(x, "fsdp"), local["weight"], local["bias"])
        partial = torch.autograd.grad(rows.pow(2).sum(), list(local.values()))
        with tag("zero.loss"):
            loss = mark(leave(rows.detach(), ("fsdp",), torch.Size((2 * DEVICES, ROWS))).mean())
        gradients = {}
        for (k, p), g in zip(params.items(), partial, strict=True):
            with tag(f"zero.gradient/{k}"):
                gradients[k] = reduced(g, p.shape)
        with tag("zero.norm"):
            norm = mark(sum(g.pow(2).sum() for g in gradients.values()).sqrt())
        for k, p in params.items():
            moment = mark(moments[k].mul_(0.9).add_(gradients[k]), "fsdp")
            with tag(f"zero.parameter/{k}"):
                mark(p.add_(mark(moment * -0.1, "fsdp")))
        executed(name)
        return loss, norm

    def annotated(g, shape):
        whole = leave(g[None], ("fsdp",), torch.Size((DEVICES, *shape)))
        return mark(whole.sum(0), "fsdp")

    def explicit(g, shape):
        group = [list(range(DEVICES))]
        shard = backend._xla_spmd_reduce_scatter("sum", g, 1.0, 0, DEVICES, group)
        return mark(leave(shard, ("fsdp",), shape), "fsdp")

    def replicated(g, shape):
        whole = leave(g[None], ("fsdp",), torch.Size((DEVICES, *shape)))
        # The elementwise reader keeps the sum whole: each device needs all of it.
        return mark(mark(whole.sum(0)).sign())

    backend._set_ir_debug(True)
    kept = [train(f.__name__, f) for f in (annotated, explicit, replicated)]

    norm = torch.nn.LayerNorm(16).to(device)
    for p in norm.parameters():
        mark(p)
    x = mark(torch.randn(8, 4, 16).to(device), "fsdp")
    settle()
    kept.append(norm(x))
    executed("leak")

    backend._set_ir_debug(False)
    layer = torch.nn.Linear(COLUMNS, COLUMNS, bias=False).to(device)
    mark(layer.weight)
    x = mark(torch.randn(3, 8, COLUMNS).to(device), None, "fsdp")
    settle()
    kept.append(gradient_accumulation(lambda t: F.mse_loss(layer(t), t.flip(1)), [x], layer))
    mark(layer.weight.grad, "fsdp")
    executed("loop")
    (folder / "aliased.txt").write_text(json.dumps(aliased))


if __name__ == "__main__":
    compile_programs(Path(sys.argv[1]))
