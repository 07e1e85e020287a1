"""`explain` on JAX: what is traced without data, and what the TPU's compiler makes of it."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero import Explanation
from spmdzero.backend import flags
from spmdzero.explain import CHIPS, Topology, _aot, require_tpu_compiler
from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra"
)
NEWEST = CHIPS["tpu7x"].libtpu
WIDTH, INNER = 128, 512
# Weights are split, biases stay whole.
SPLIT, WHOLE = 2 * WIDTH * INNER, WIDTH + INNER
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) - x).pow(2).mean()


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), Net()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(net(norm(x)) for norm, net in self.blocks)  # type: ignore[bad-return]


def explained(model: nn.Module, tpu: str = "v5e:2x4", **config: object) -> Explanation:
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16)
    return spmdzero.explain(model, CONFIG | config, x, tpu=[tpu], stages=())


def knows_tpu7x() -> bool:
    version = importlib.metadata.version("libtpu")
    return tuple(map(int, version.split(".")[:3])) >= tuple(map(int, NEWEST.split(".")))


def hollow_on(tpu: str, kind: type[nn.Module] = Net, **config: object) -> Explanation:
    with torch.device("meta"):
        model = kind()
    return explained(model, tpu, **config)


@pytest.fixture(scope="module")
def hollow() -> Explanation:
    return hollow_on("v5e:2x4")


def moved(explanation: Explanation, target: str = "v5e:2x4") -> dict[tuple[str, str, str], int]:
    """Role, kind and dtype -> bytes."""
    found: dict[tuple[str, str, str], int] = {}
    for program in explanation.moves_on(target).programs:
        for c in program.ledger.collectives:
            key = (c.role, c.kind, c.dtype)
            found[key] = found.get(key, 0) + program.runs * c.bytes
    return found


def test_a_step_without_data_scatters_and_gathers_by_name_with_the_planned_bytes(
    hollow: Explanation,
) -> None:
    assert moved(hollow) == {
        ("gradient", "reduce-scatter", "bf16"): 2 * SPLIT,
        ("gradient", "all-reduce", "bf16"): 2 * WHOLE,
        ("parameter", "all-gather", "bf16"): 2 * SPLIT,
        ("norm", "all-reduce", "f32"): 4,
        ("output", "all-reduce", "bf16"): 2,
    }
    moves = hollow.moves_on("v5e:2x4")
    names = {c.tensor for c in moves.programs[0].ledger.of_role("gradient")}
    assert names == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert (moves.activations, moves.unnamed, moves.refused) == ((), (), ())
    assert moves.over_floor == pytest.approx(1, rel=1e-3)
    assert (hollow.audit.findings, hollow.tpu_note) == ((), "")


def test_the_compilers_inputs_are_the_plans_shards_and_their_memory_is_reused(
    hollow: Explanation,
) -> None:
    fit = hollow.fit_at(2)
    (memory,) = fit.compiled
    assert memory.memory.arguments is not None
    # Beside the states, an input is the batch, or a scalar such as the learning rate.
    assert fit.states <= memory.memory.arguments <= 1.03 * fit.states
    # New states in memory of their own would be as much again.
    assert memory.memory.peak < 2 * memory.memory.arguments


def test_a_model_with_data_compiles_to_the_program_of_one_without_and_trains_afterwards(
    hollow: Explanation,
) -> None:
    real = explained(Net())
    assert moved(real) == moved(hollow)
    assert real.fit_at(2).compiled[1:] == hollow.fit_at(2).compiled
    assert (real.audit.steps, real.audit.findings, real.tpu_note) == (3, (), "")
    engine, *_ = spmdzero.initialize(model=Net(), config=CONFIG)
    x = torch.randn(32, WIDTH, dtype=torch.bfloat16)
    losses = [engine.train_batch(iter([x])).item() for _ in range(3)]
    explanation = engine.explain(x, tpu=["v5e:2x4"])
    losses.append(engine.train_batch(iter([x])).item())
    assert losses == sorted(losses, reverse=True)
    assert ("gradient", "reduce-scatter", "bf16") in moved(explanation)


def test_time_is_told_by_module_and_by_torchs_operations() -> None:
    time = hollow_on("v5e:2x4", Tree).time_on("v5e:2x4")
    modules = {share.name: share.seconds for share in time.modules}
    assert {f"blocks.{i}.{name}" for i in (0, 1) for name in ("0", "1.up", "1.down")} <= {*modules}
    kinds = {share.name: share.seconds for share in time.kinds}
    assert min(kinds[kind] for kind in ("matmul", "normalisation", "optimizer", "wire")) > 0
    # A forward and two products of each layer's backward but the first one's of an input.
    macs = 4 * WIDTH * INNER
    assert time.flops == 2 * 2 * macs * (3 + 3)
    operations = {o.traced_as for o in time.dearest if o.module is not None}
    assert operations
    assert all(name.startswith("aten::") for name in operations)


def test_gradients_of_accumulated_micro_batches_are_programs_of_two_kinds() -> None:
    explanation = hollow_on("v5e:2x4", gradient_accumulation_steps=4)
    micro, boundary = explanation.moves_on("v5e:2x4").programs
    assert (micro.kind, micro.runs, boundary.kind, boundary.runs) == ("micro", 3, "boundary", 1)
    assert all(program.ledger.of_role("gradient") for program in (micro, boundary))
    assert {c.role for c in micro.ledger.collectives} == {"gradient", "output"}


def test_two_devices_of_a_chip_scatter_and_gather_beside_compute() -> None:
    if not knows_tpu7x():
        pytest.skip(f"libtpu {importlib.metadata.version('libtpu')} doesn't know tpu7x")
    explanation = hollow_on("tpu7x:2x2x1")
    moves = explanation.moves_on("tpu7x:2x2x1")
    assert moved(explanation, "tpu7x:2x2x1") == {
        ("gradient", "reduce-scatter", "bf16"): 2 * SPLIT,
        ("gradient", "all-reduce", "bf16"): 2 * WHOLE,
        ("parameter", "all-gather", "bf16"): 2 * SPLIT,
        ("norm", "all-reduce", "f32"): 4,
        ("output", "all-reduce", "bf16"): 2,
    }
    assert (moves.activations, moves.unnamed, moves.refused) == ((), (), ())
    assert moves.over_floor == pytest.approx(1, rel=1e-3)
    # What a SparseCore does is asynchronous without any flag.
    split = [c for c in moves.programs[0].ledger.collectives if c.kind != "all-reduce"]
    assert [(c.asynchronous, c.group_size) for c in split] == 4 * [(True, 8)]
    accumulated = hollow_on("tpu7x:2x2x1", gradient_accumulation_steps=2)
    micro, _ = accumulated.moves_on("tpu7x:2x2x1").programs
    assert {c.role for c in micro.ledger.collectives} == {"gradient", "output"}
    time = explanation.time_on("tpu7x:2x2x1")
    assert time.clock == pytest.approx(2.2e9, rel=1e-3)
    assert time.wire == pytest.approx(sum(c.wire_bytes for c in split) / 300e9, rel=0.02)
    assert 0 < time.hidden < time.wire < time.seconds
    (memory,) = explanation.fit_at(2).compiled
    assert (memory.fits, memory.hbm_bytes) == (True, 96 * 2**30)


PLACES = """
import json, sys
from spmdzero.explain._aot_child import devices_of
print(json.dumps([
    [(d.process_index, *d.coords, d.core_on_chip) for d in devices_of(json.loads(request))]
    for request in sys.argv[1:]
]))
"""


def test_devices_stand_in_the_mesh_chip_by_chip_and_host_by_host() -> None:
    names = ["v6e:2x4,hosts=2", "v5e:4x4", "v5p:2x2x2"]
    if knows_tpu7x():
        names += ["tpu7x:2x2x1", "tpu7x:2x4", "tpu7x:4x4x4"]
    slices = [Topology.parse(name) for name in names]
    requests = [json.dumps(_aot._request(topology, None)) for topology in slices]
    done = subprocess.run(
        [sys.executable, "-c", PLACES, *requests], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=environment(**_aot._ENVIRONMENT), timeout=300, check=True,
    )  # fmt: skip
    for topology, places in zip(slices, json.loads(done.stdout.splitlines()[-1]), strict=True):
        hosts = [place[0] for place in places]
        each = topology.devices // topology.hosts
        assert hosts == [host for host in range(topology.hosts) for _ in range(each)]
        # The devices of a chip are beside each other, along the mesh's last axis.
        count = topology.chip.devices
        chips = [places[start : start + count] for start in range(0, len(places), count)]
        for chip in chips:
            assert [core for *_, core in chip] == list(range(count))
            assert len({tuple(place[:-1]) for place in chip}) == 1


def test_on_tpu7x_auto_is_the_published_set() -> None:
    if not knows_tpu7x():
        pytest.skip(f"libtpu {importlib.metadata.version('libtpu')} doesn't know tpu7x")
    plain = hollow_on("tpu7x:2x2x1")
    flagged = hollow_on("tpu7x:2x2x1", spmd={"xla_flags": "auto"})
    added = {*flagged.xla_flags} - {*plain.xla_flags}
    assert added == {f"{name}={value}" for name, value in flags.flags_for("tpu7x").items()}
    assert len(added) == 4
    # libtpu refuses a flag that it doesn't know, and these make a program that moves the same.
    assert moved(flagged, "tpu7x:2x2x1") == moved(plain, "tpu7x:2x2x1")


def test_a_set_with_a_flag_that_an_older_libtpu_does_not_know_is_refused_by_its_name() -> None:
    if knows_tpu7x():
        pytest.skip(f"libtpu {importlib.metadata.version('libtpu')} knows each flag")
    said = r"(?s)No such compile option: 'xla_tpu_.*the set that \"spmd\": \{\"xla_flags\""
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match=said):
        hollow_on("v6e:2x4", spmd={"xla_flags": "tpu7x"})


class Narrow(Net):
    """Adds a product of int8, which takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH, WIDTH, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.detach().to(torch.int8) @ self.table
        return super().forward(x + found.to(x.dtype))


def test_a_product_of_int8_is_rated_at_the_chips_peak_of_int8() -> None:
    plain, narrow = (hollow_on("v6e:2x4", kind) for kind in (Net, Narrow))
    v6e, rows = CHIPS["v6e"], 4
    assert plain.time_on("v6e:2x4").peak_flops == v6e.bf16_flops
    time, added = narrow.time_on("v6e:2x4"), 2 * rows * WIDTH**2
    assert v6e.int8_flops is not None
    assert time.flops - plain.time_on("v6e:2x4").flops == added
    seconds = (time.flops - added) / v6e.bf16_flops + added / v6e.int8_flops
    assert time.peak_flops == pytest.approx(time.flops / seconds)
    (line,) = narrow.rooflines
    (before,) = plain.rooflines
    assert line.compute < before.compute * (1 + added / plain.time_on("v6e:2x4").flops)


def test_flags_that_a_newer_libtpu_refuses_are_told_by_the_configs_key() -> None:
    if not knows_tpu7x():
        pytest.skip(f"libtpu {importlib.metadata.version('libtpu')} compiles with each flag")
    said = r'(?s)ReduceScatter.*other than TPU v5e.*"spmd": \{"xla_flags": ...\} names; "none"'
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match=said):
        hollow_on("v6e:2x4", spmd={"xla_flags": "v5e"})
    assert hollow_on("v6e:2x4", spmd={"xla_flags": "auto"}).xla_flags


def test_a_libtpu_that_does_not_know_a_generation_says_which_one_does() -> None:
    if knows_tpu7x():
        pytest.skip(f"libtpu {importlib.metadata.version('libtpu')} knows tpu7x")
    here = re.escape(importlib.metadata.version("libtpu"))
    said = rf"libtpu {here} has no topology tpu7x:2x2x1 .*TPU7x.* libtpu {re.escape(NEWEST)} "
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match=rf"{said}.*v4, v5e, v5p, v6e$"):
        hollow_on("tpu7x:2x2x1")


@pytest.mark.parametrize("tpu", ["v4:2x2x2", pytest.param("v6e:2x4", marks=pytest.mark.slow)])
def test_other_generations_scatter_and_gather_what_is_planned(tpu: str) -> None:
    explanation = hollow_on(tpu)
    moves = explanation.moves_on(tpu)
    bytes_moved = moved(explanation, tpu)
    assert bytes_moved["parameter", "all-gather", "bf16"] == 2 * SPLIT
    assert ("gradient", "reduce-scatter", "bf16") in bytes_moved
    assert moves.over_floor == pytest.approx(1, rel=1e-3)
    assert 0 < explanation.time_on(tpu).wire < explanation.time_on(tpu).seconds


def test_over_two_axes_each_collective_is_of_its_own_axis() -> None:
    explanation = hollow_on("v5e:2x4", spmd={"mesh": {"data": 2, "fsdp": -1}})
    (program,) = explanation.moves_on("v5e:2x4").programs
    split = [c for c in program.ledger.collectives if c.kind != "all-reduce"]
    assert {(c.kind, c.group_size) for c in split} == {("reduce-scatter", 4), ("all-gather", 4)}
    whole = [c for c in program.ledger.of_role("gradient") if c.kind == "all-reduce"]
    sizes = {(c.tensor, c.group_size) for c in whole}
    assert sizes == {("up.weight", 2), ("down.weight", 2), ("up.bias", 8), ("down.bias", 8)}
    assert explanation.moves_on("v5e:2x4").over_floor == pytest.approx(1, rel=1e-3)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(INNER, INNER) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.pow(2).mean()


def test_the_sets_flags_hide_the_wire_of_what_jax_lowered() -> None:
    waited, kinds = {}, {}
    for flag_set in ("none", "auto"):
        config = CONFIG | {"train_micro_batch_size_per_gpu": 32, "spmd": {"xla_flags": flag_set}}
        x = torch.randn(256, INNER, dtype=torch.bfloat16)
        with torch.device("meta"):
            model = Wide()
        explanation = spmdzero.explain(model, config, x, tpu=["v5e:2x4"], stages=())
        (program,) = explanation.moves_on("v5e:2x4").programs
        kinds[flag_set] = Counter(
            (c.kind, c.asynchronous) for c in program.ledger.collectives if c.kind != "all-reduce"
        )
        waited[flag_set] = explanation.time_on("v5e:2x4").exposed
        flag = "xla_enable_async_reduce_scatter_fusion=true"
        assert (flag in explanation.xla_flags) is (flag_set == "auto")
    # One of each kind for each matrix; with the flags they start and end around compute.
    assert kinds["none"] == {("reduce-scatter", False): 4, ("all-gather", False): 4}
    assert kinds["auto"] == {("reduce-scatter", True): 4, ("all-gather", True): 4}
    assert waited["auto"] < waited["none"] / 2


@pytest.mark.slow
def test_the_command_explains_on_as_many_chips_as_the_topology_has(tmp_path: Path) -> None:
    config = CONFIG | {"train_micro_batch_size_per_gpu": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spmdzero", "explain", "tests.jax_backend.test_explain:Net"),
            *(str(tmp_path / "ds.json"), "--batch", f"{{devices}}x{WIDTH}:bfloat16", "--meta"),
            *("--tpu", "v5e:2x2", "--own-stage", "--json"),
        ],
        cwd=ROOT, env=environment(SPMDZERO_BACKEND="jax"), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    explanation = Explanation.from_json(json.dumps(found))
    assert explanation.devices == 4
    assert ("gradient", "reduce-scatter", "bf16") in moved(explanation, "v5e:2x2")
    assert "explain: compiling for v5e:2x2 took" in done.stderr


def test_without_libtpu_it_says_what_brings_that_of_this_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else own(name)
    )
    needed = r"needs libtpu, which is not installed: pip install 'jax\[tpu\]'"
    with pytest.raises(spmdzero.SpmdZeroRuntimeError, match=needed):
        require_tpu_compiler()
