"""Trainer and accelerate on two hosts, beside themselves on two ranks of torch's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import by_torchrun, hosts, run_hosts, told
from tests.integrations import test_accelerate, test_lightning
from tests.integrations.test_transformers import NUMBERS, SCENARIOS, same_run

pytestmark = pytest.mark.backends("any")

ALSO = {**SCENARIOS, "best": ("sums", "squares")} | dict.fromkeys(
    ("dpo_short", "main"), ("squares",)
)
TRAINER = (
    "accumulation", "best", "classification", "compute_loss_func", "dpo_short", "fused_loss",
    "label_smoothing", "main", "mean_accumulation", "predict", "uneven",
)  # fmt: skip
# Of the JSON's own schedule accelerate makes as many steps as there are processes, of these too.
_TORCHS = {"optimizer": "torch", "schedule": "torch"}
ACCELERATE = {
    name: test_accelerate.ORDERS[name] | _TORCHS
    for name in ("dummies", "accumulation", "cut", "uneven", "frozen")
}
# Two micro-batches of each rank, and one that has half of the rows.
LIGHTNING = {"data": 40, "rows": 8, "validate_every": 2, "shuffle": False, "hosts": 2}
Ranks = list[dict[str, Any]]


def both(kind: str, module: str, *arguments: str, by: Any = by_torchrun) -> Ranks:
    """What each of two processes finds, which know of each other `by` what is in the variables."""
    return run_hosts(
        f"tests.integrations.{module}", kind, *arguments,
        count=2, devices=4 if kind == "spmdzero" else 1, place=by, OMP_NUM_THREADS="1",
    )  # fmt: skip


def trained(kind: str, folder: Path, *names: str) -> Ranks:
    return both(kind, "trainer_runs", str(folder), *names)


@pytest.mark.slow
def test_two_hosts_train_and_evaluate_as_two_ranks_of_plain_trainer(tmp_path: Path) -> None:
    plain = trained("plain", tmp_path / "plain", "short")
    ours = trained("spmdzero", tmp_path / "ours", "short")
    for mine, theirs in zip(ours, plain, strict=True):
        same_run(mine["short"], theirs["short"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return trained("plain", tmp_path_factory.mktemp("plain"), *TRAINER)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return trained("spmdzero", tmp_path_factory.mktemp("ours"), *TRAINER, "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINER)
def test_each_kind_of_trainers_run_is_that_of_two_ranks(
    ours: Ranks, plain: Ranks, name: str
) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        same_run(mine[name], theirs[name], *ALSO[name])


@pytest.mark.slow
def test_a_resumed_trainer_is_bit_for_bit_the_one_that_never_stopped(ours: Ranks) -> None:
    for host in ours:
        found = host["resumed"]
        for key in (*NUMBERS[:3], "weights"):
            assert found["again"][key] == found["straight"][key]


@pytest.fixture(scope="module")
def loops() -> dict[str, Ranks]:
    orders = json.dumps([*ACCELERATE.values()])
    return {kind: both(kind, "accelerate_loop", orders) for kind in ("plain", "spmdzero")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerates_loop_is_that_of_two_ranks(loops: dict[str, Ranks], name: str) -> None:
    place = list(ACCELERATE).index(name)
    for mine, theirs in zip(loops["spmdzero"], loops["plain"], strict=True):
        own, plain = mine["spmdzero"][place], theirs["plain"][place]
        test_accelerate.assert_same_numbers(own, plain)
        if "guesses" in plain:
            assert own["guesses"] == plain["guesses"]
            assert own["eval losses"] == pytest.approx(plain["eval losses"], rel=1e-5)


def by_node(rank: int, count: int, port: str) -> dict[str, str]:
    """What Lightning reads."""
    return {**by_torchrun(rank, count, port), "NODE_RANK": str(rank)}


@pytest.mark.slow
def test_lightning_trains_as_on_two_ranks_whatever_the_launcher_says() -> None:
    order = json.dumps([LIGHTNING])
    first, second = (
        host["plain"][0] for host in both("plain", "lightning_loop", order, by=by_node)
    )
    ours = [host["spmdzero"][0] for host in both("spmdzero", "lightning_loop", order)]
    for mine in ours:
        for name in ("losses", "logged"):
            # A loss of the module's is the mean over hosts.
            pairs = zip(first[name], second[name], strict=True)
            means = [(one + other) / 2 for one, other in pairs]
            assert mine[name] == pytest.approx(means, rel=test_lightning.TOLERANCE)
        assert mine["lr"] == first["lr"]
        for found, plain in zip(mine["validated"], first["validated"], strict=True):
            for name in ("val_accuracy", "val_right"):
                assert found[name] == pytest.approx(plain[name], rel=test_lightning.TOLERANCE)


@pytest.mark.slow
def test_lightning_that_was_told_of_one_host_is_refused_on_two() -> None:
    order = told([{**LIGHTNING, "hosts": 1}])
    with hosts("tests.integrations.lightning_loop", "spmdzero", order, count=2, devices=2) as both:
        for host in both:
            assert host.wait(300) == 1
            assert "num_nodes=1), and 2 hosts train together" in host.said()[1]
            assert "Say num_nodes=2" in host.said()[1]
