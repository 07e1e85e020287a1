"""Real DeepSpeed goes on from what spmdzero wrote, and back: the round trip in mid-run."""

from pathlib import Path
from typing import Any

import pytest

from spmdzero.formats import Conversion, convert
from tests.interchange.record import OUT, TAG, convert_to_universal, order, train
from tests.interchange.spmdzero_run import run
from tests.interchange.test_read import TOLERANCES

pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.slow]
NAMES = [
    "z1_w2_fp32_tied",
    "z1_w2_bf16_gacc32",
    "z2_w4_bf16_frozen",
    "z2_w2_fp16",
    "z2_w2_fp32_sgd",
    "z3_w2_fp32",
    "z3_w2_fp32_tied",
    "z3_w4_bf16_frozen",
]
SAVED, STEPS = 4, 7

Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interchange")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Runs:
    """What spmdzero saw, which saved both of DeepSpeed's formats on the way."""
    orders = [
        order(
            name,
            start=0,
            steps=STEPS,
            save=str(folder / name),
            save_at=SAVED,
            save_as=["deepspeed", "universal"],
            ranks=2,
        )
        for name in NAMES
    ]
    return dict(zip(NAMES, run(orders, devices=4), strict=True))


def resumed(folder: Path, *, ranks: int, universal: bool) -> Runs:
    # torch's SGD has no step to save, without which DeepSpeed's universal format can't be loaded;
    # its stage 3 gives every param group the first one's numbers, and all one count of updates.
    left_out = ("sgd", "z3") if universal else ()
    names = [name for name in NAMES if not any(part in name for part in left_out)]
    orders = [
        order(
            name,
            start=SAVED,
            steps=STEPS - SAVED,
            load=str(folder / name),
            universal=universal,
            save=str(folder / f"{name}_back"),
            save_at=SAVED + 1,
        )
        for name in names
    ]
    return dict(zip(names, train(orders, ranks=ranks), strict=True))


@pytest.fixture(scope="module")
def theirs(folder: Path, ours: Runs) -> Runs:
    return resumed(folder, ranks=2, universal=False)


def assert_goes_on(name: str, theirs: dict[str, Any], ours: dict[str, Any], *, since: int) -> None:
    allowed = TOLERANCES[name.split("_")[2]]
    assert theirs["losses"] == pytest.approx(ours["losses"][since:], abs=allowed)
    for key in ("global_steps", "skipped_steps", "lr"):
        assert theirs[key] == ours[key], key


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_goes_on_from_the_files_written_for_its_ranks(
    ours: Runs, theirs: Runs, name: str
) -> None:
    assert_goes_on(name, theirs[name], ours[name], since=SAVED)
    assert {"epoch", "note"} <= set(theirs[name]["client_state"])


@pytest.mark.parametrize("ranks", [1, 4])
def test_deepspeed_of_other_ranks_goes_on_from_the_universal_files(
    folder: Path, ours: Runs, ranks: int
) -> None:
    for name, theirs in resumed(folder, ranks=ranks, universal=True).items():
        assert_goes_on(name, theirs, ours[name], since=SAVED)


def test_the_round_trip_ends_with_the_losses_of_a_run_that_made_none(
    folder: Path, ours: Runs, theirs: Runs
) -> None:
    back = SAVED + 1
    orders = [
        order(name, start=back, steps=STEPS - back, load=str(folder / f"{name}_back"))
        for name in NAMES
    ]
    for name, mine in zip(NAMES, run(orders, devices=2), strict=True):
        assert_goes_on(name, mine, ours[name], since=back)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stage_3_goes_on_from_universal_files_as_from_those_of_deepspeeds_converter(
    tmp_path: Path, ranks: int
) -> None:
    name = "z3_w2_fp32"
    convert_to_universal(OUT / name / TAG, tmp_path / "theirs")
    convert(OUT / name, tmp_path / "ours", Conversion(to="universal", stage=3))
    orders = [
        order(name, start=SAVED, steps=STEPS - SAVED, load=str(tmp_path / who), universal=True)
        for who in ("theirs", "ours")
    ]
    theirs, ours = train(orders, ranks=ranks)
    assert ours["losses"] == theirs["losses"]
    assert (ours["global_steps"], ours["lr"]) == (theirs["global_steps"], theirs["lr"])
