"""A checkpoint that one backend saved is the other's too: the same state, and training goes on."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spmdzero.backend import current
from tests.checkpoint.legs import Leg, Seen, differing, differing_tensors, run_leg, run_legs, saved
from tests.checkpoint.runs import config
from tests.engine.test_trajectories import BF16, FP16, FP32
from tests.support.backends import VARIABLES, installed, other_than

COUNTS = ("lr", "scale", "skipped", "steps", "samples")
BACKENDS = tuple(VARIABLES)
pytestmark = pytest.mark.skipif(
    not all(installed(backend) for backend in VARIABLES), reason="needs both backends"
)


def assert_goes_on(mine: Seen, expected: Seen, *, allowed: float) -> None:
    """The same counters, scale and rates, and losses as near as to DeepSpeed's recorded ones."""
    assert mine["losses"] == pytest.approx(expected["losses"], abs=allowed)
    for key in COUNTS:
        assert mine[key] == expected[key], key


def test_the_other_backend_resumes_what_this_one_saved_and_this_one_what_it_saved(
    tmp_path: Path,
) -> None:
    here, there, back = (str(tmp_path / name) for name in ("here", "there", "back"))
    settings = config(1, gas=2)
    # In the middle of a step, and of an epoch.
    begin = Leg(settings=settings, micro_batches=3, save=here, after=3)
    undisturbed = run_leg(begin, devices=8)
    undisturbed["losses"] = undisturbed["losses"][3:]
    other = Leg(settings=settings, load=here, again=there, micro_batches=3, save=there)
    (seen,) = run_legs([other], backend=other_than(current().name), devices=8)
    first = saved(here, "end")
    assert {"rng", "loader", "scheduler", "accumulation"} <= {
        field for field, value in vars(first.host).items() if value is not None
    }
    assert differing(first, saved(there, "again")) == []
    assert_goes_on(seen, undisturbed, allowed=FP32.loss)
    run_leg(Leg(settings=settings, load=there, again=back), devices=8)
    assert differing(saved(there, "end"), saved(back, "again")) == []


class Case(NamedTuple):
    """A run that changes its backend on the way.

    Attributes:
        settings: its config.
        micro_batches: before the change.
        after: after it.
        devices: of the first backend and of the second.
        allowed: how far a loss may be from that of the run that didn't change.
        replayed: trained by `train_batch`.
    """

    settings: dict[str, Any]
    micro_batches: int
    after: int
    devices: tuple[int, int]
    allowed: float
    replayed: bool = False


BF16_ON: dict[str, Any] = {"bf16": {"enabled": True}}
# The first steps overflow, and are skipped.
FP16_ON: dict[str, Any] = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 34}}
PRECISIONS = {"fp32": ({}, FP32), "bf16": (BF16_ON, BF16), "fp16": (FP16_ON, FP16)}
CASES = {
    f"{precision}, stage {stage}, {first} to {second}": Case(
        settings=config(stage, gas=2, **more),
        # Other devices sum what waits in the middle of a step in another order.
        micro_batches=5 if first == second else 6,
        after=5 if first == second else 6,
        devices=(first, second),
        allowed=close.loss,
    )
    for precision, (more, close) in PRECISIONS.items()
    for stage in (1, 2)
    for first, second in ((8, 8), (8, 4))
} | {
    f"{precision}, replayed": Case(
        config(2, **PRECISIONS[precision][0]), 6, 6, (8, 8), PRECISIONS[precision][1].loss, True
    )
    for precision in PRECISIONS
}
Runs = dict[str, Seen]


class Change(NamedTuple):
    """What was seen of a change from one backend to the other.

    Attributes:
        folder: of all that was saved.
        stayed: by case, the run that went on with the backend and devices that it had, or, where
            the devices changed, with the first backend on as many as the second had.
        changed: the one that went on with the second.
        from_deepspeed: as that, from the same state in DeepSpeed's format.
    """

    folder: Path
    stayed: Runs
    changed: Runs
    from_deepspeed: Runs


def resumed(folder: Path, *, kind: str, backend: str, again: str) -> Runs:
    """Each case from what was saved of it, on the devices that it changes to."""
    seen: Runs = {}
    for devices in (8, 4):
        cases = {
            name: case
            for name, case in CASES.items()
            if case.devices[1] == devices and (folder / name / kind).exists()
        }
        legs = [
            Leg(
                settings=case.settings,
                load=str(folder / name / kind),
                again=str(folder / name / again),
                micro_batches=case.after,
                replayed=case.replayed,
            )
            for name, case in cases.items()
        ]
        seen |= dict(zip(cases, run_legs(legs, backend=backend, devices=devices), strict=True))
    return seen


@pytest.fixture(scope="module", params=BACKENDS, ids=[f"{first} first" for first in BACKENDS])
def change(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Change:
    folder, first = tmp_path_factory.mktemp("change"), request.param
    second = other_than(first)
    begin = [
        Leg(
            settings=case.settings,
            micro_batches=case.micro_batches,
            save=str(folder / name / "native"),
            # In the middle of a step DeepSpeed has no checkpoints.
            deepspeed=str(folder / name / "deepspeed") if case.micro_batches % 2 == 0 else None,
            replayed=case.replayed,
        )
        for name, case in CASES.items()
    ]
    run_legs(begin, backend=first, devices=8)
    return Change(
        folder,
        resumed(folder, kind="native", backend=first, again="stayed"),
        resumed(folder, kind="native", backend=second, again="changed"),
        resumed(folder, kind="deepspeed", backend=second, again="from deepspeed"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_the_other_backend(change: Change, name: str) -> None:
    case, folder = CASES[name], change.folder / name
    assert differing(saved(folder / "native", "end"), saved(folder / "changed", "again")) == []
    assert_goes_on(change.changed[name], change.stayed[name], allowed=case.allowed)
    if case.replayed:
        assert change.changed[name]["replayed"]
    if "fp16" in name:
        assert change.changed[name]["skipped"] > 0
    if name in change.from_deepspeed:
        # DeepSpeed's format has no place for generators and the position in the data.
        written, read = (saved(folder / "native", "end"), saved(folder / "from deepspeed", "again"))
        assert differing_tensors(written, read) == []
        for key in ("lr", "scale", "steps", "samples"):
            assert change.from_deepspeed[name][key] == change.changed[name][key], key
