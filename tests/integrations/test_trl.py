"""TRL's trainers on 8 devices, beside themselves without DeepSpeed on a CPU."""

import functools
from typing import Any

import pytest

from tests.integrations.test_transformers import CLOSE, run

pytestmark = [pytest.mark.backends("jax", test_all="torch_xla"), pytest.mark.slow]

_OF_DPO = ("logps/chosen", "logits/rejected", "entropy", "rewards/margins")
# What is compared of each, beside losses, norms and weights.
SCENARIOS: dict[str, tuple[str, ...]] = {
    "sft": ("entropy", "mean_token_accuracy"),
    "sft_packed": ("entropy", "mean_token_accuracy"),
    "dpo": (*_OF_DPO, "rewards/accuracies"),
    # Where the reference is the model itself, the first steps ask of rounding which is higher.
    "dpo_precomputed": _OF_DPO,
    "dpo_lora": _OF_DPO,
    "reward": ("accuracy", "margin", "min_reward"),
    "kto": ("rewards/chosen", "rewards/rejected", "kl"),
}
EVALUATED = ("dpo", "reward")
# Rewards are differences of sums of 60 or so, of which fp32 has 4e-6.
MEASURED = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("plain", tmp_path_factory.mktemp("plain"), *SCENARIOS)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("spmdzero", tmp_path_factory.mktemp("ours"), *SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trainer_of_trl_has_the_numbers_that_it_has_without_devices(
    ours: dict[str, Any], plain: dict[str, Any], name: str
) -> None:
    mine, theirs = ours[name], plain[name]
    assert "error" not in mine, mine["error"]
    for key in ("loss", "grad_norm", "learning_rate", "train_loss", "squares"):
        assert mine[key] == CLOSE(theirs[key]), key
    assert min(theirs["loss"][5:]) < theirs["loss"][0]
    for key in SCENARIOS[name]:
        assert mine[key] == MEASURED(theirs[key]), key
    assert len(mine["eval"]) == (2 if name in EVALUATED else 0)
    for found, wanted in zip(mine["eval"], theirs["eval"], strict=True):
        assert found == MEASURED(wanted)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_step_of_it_after_the_third_compiles(ours: dict[str, Any], name: str) -> None:
    # An epoch's short end, which the fourth step needs first, is a program of its own.
    compiled = ours[name]["compiled"][3:]
    assert set(compiled) == {compiled[0]}
