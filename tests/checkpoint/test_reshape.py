"""Any mesh to any mesh, any stage to any stage: the state is the same, bit for bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import assert_state, config, start, train, whole_state
from tests.support.processes import run_module
from tests.support.selected import outside

State = dict[str, torch.Tensor]
MESHES: list[dict[str, int]] = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 4, "fsdp": 2},
    {"data": 8, "fsdp": 1},
]


def settings(stage: int, mesh: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    spmd: dict[str, Any] = {"min_shard_elements": 64, "mesh": mesh or {"fsdp": -1}}
    return config(stage, spmd=spmd, **more)


def weights(state: State) -> State:
    """The fp32 weights and optimizer states, in fp32 and in bf16 runs under the same names."""
    found = {k: v for k, v in state.items() if not k.startswith(("parameter/", "master/"))}
    for name, tensor in state.items():
        if name.startswith("parameter/"):
            own = name.removeprefix("parameter/")
            found[f"weight/{own}"] = state.get(f"master/{own}", tensor.float())
    return found


def differing(first: State, second: State) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def on_devices(devices: int, source: Path, target: Path, settings: dict[str, Any]) -> State:
    """The state that a new process on so many devices loads from one folder and saves again."""
    file = target.with_suffix(".pt")
    run_module(
        "tests.checkpoint.test_reshape",
        *(str(source), str(target), json.dumps(settings), str(file)),
        devices=devices,
    )
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """After two steps, and one micro-batch of two in the third."""
    folder = tmp_path_factory.mktemp("saved")
    engine = start(settings(2, gas=2))
    train(engine, range(5))
    engine.save_checkpoint(folder)
    return folder, whole_state(engine)


# The meshes of the middle axes at the stages that shard most differently are enough.
PLACES = [(0, mesh) for mesh in MESHES] + [(1, MESHES[0])] + [(2, mesh) for mesh in MESHES]
PLACES += [(3, mesh) for mesh in MESHES]
# Each stage and each mesh.
QUICK = [(0, MESHES[0]), (1, MESHES[0]), (2, MESHES[1]), (3, MESHES[2]), (3, MESHES[3])]


@pytest.mark.parametrize(
    ("stage", "mesh"),
    [pytest.param(*place, marks=outside(QUICK, place)) for place in PLACES],
    ids=str,
)
def test_a_state_is_the_same_at_every_stage_on_every_mesh_and_back(
    saved: tuple[Path, State], stage: int, mesh: dict[str, int], tmp_path: Path
) -> None:
    folder, state = saved
    engine = start(settings(stage, mesh, gas=2))
    engine.load_checkpoint(folder)
    found = whole_state(engine)
    gradients = {n.removeprefix("accumulator/"): t for n, t in found.items() if "accumulator" in n}
    for name, gradient in gradients.items():
        kept = state[f"accumulator/{name}"]
        # Summands on each device at stages 0 and 1: their sum is what stage 2 had summed.
        total = gradient.sum(0) if gradient.dim() > kept.dim() else gradient
        assert torch.equal(total, kept), name
    others = {name: t for name, t in found.items() if not name.startswith("accumulator/")}
    assert differing(others, {name: state[name] for name in others}) == []
    engine.save_checkpoint(tmp_path)
    back = start(settings(2, gas=2))
    back.load_checkpoint(tmp_path)
    assert_state(back, state)


def test_summands_of_another_mesh_become_their_sum(tmp_path: Path) -> None:
    engine = start(settings(1, gas=2))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    rows = whole_state(engine)["accumulator/odd.weight"]
    other = start(settings(2, gas=2))
    other.load_checkpoint(tmp_path)
    # In the order of the devices, one by one, as documented.
    assert torch.equal(whole_state(other)["accumulator/odd.weight"], sum(rows[1:], start=rows[0]))


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3]
)
def test_fp32_becomes_bf16_with_fp32_masters_and_fp32_again(stage: int, tmp_path: Path) -> None:
    engine = start(settings(2))
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "fp32")
    half = start(settings(stage, bf16={"enabled": True}))
    half.load_checkpoint(tmp_path / "fp32")
    assert differing(weights(whole_state(engine)), weights(whole_state(half))) == []
    for name, parameter in engine.module.named_parameters():
        rounded = half.module.get_parameter(name)
        assert torch.equal(rounded.cpu(), parameter.cpu().bfloat16())
    half.save_checkpoint(tmp_path / "bf16")
    again = start(settings(2))
    again.load_checkpoint(tmp_path / "bf16")
    assert_state(again, whole_state(engine))


CHAINS = [([2], 2), ([4, 2, 1], 0), ([4, 2, 1], 1), ([4, 2, 1], 2), ([3, 7], 2)]
CHAINS += [([4, 2, 1], 3), ([3, 7], 3)]


@pytest.mark.parametrize(
    ("counts", "stage"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != CHAINS[0])) for case in CHAINS],
    ids=str,
)
def test_eight_devices_to_others_and_back(tmp_path: Path, counts: list[int], stage: int) -> None:
    engine = start(settings(2))
    train(engine, range(2))
    source = tmp_path / "8"
    engine.save_checkpoint(source)
    state = whole_state(engine)
    for devices in counts:
        target = tmp_path / str(devices)
        found = on_devices(devices, source, target, settings(stage))
        assert differing(found, state) == [], devices
        source = target
    back = start(settings(2))
    back.load_checkpoint(source)
    assert_state(back, state)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_state_of_stage_3_on_every_mesh_is_the_same_at_every_stage(
    stage: int, mesh: dict[str, int], tmp_path: Path
) -> None:
    engine = start(settings(3, mesh))
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "of stage 3")
    state = whole_state(engine)
    for number, target in enumerate(MESHES):
        other = start(settings(stage, target))
        other.load_checkpoint(tmp_path / "of stage 3")
        assert differing(whole_state(other), state) == [], target
        other.save_checkpoint(tmp_path / str(number))
        back = start(settings(3, mesh))
        back.load_checkpoint(tmp_path / str(number))
        assert_state(back, state)


def main() -> None:
    """`CPU_NUM_DEVICES=2 python -m tests.checkpoint.test_reshape FROM TO SETTINGS STATE.pt`"""
    source, target, settings, file = sys.argv[1:]
    engine = start(json.loads(settings))
    engine.load_checkpoint(source)
    torch.save(whole_state(engine), file)
    engine.save_checkpoint(target)


if __name__ == "__main__":
    main()
