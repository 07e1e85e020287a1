"""Hugging Face's Trainer with DeepSpeed's JSON on 8 devices, beside Trainer without it on a CPU."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from spmdzero.backend import current
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

# Of numbers of fp32 after up to 20 steps of two libraries that add in different orders. Measured
# are 3e-7 at the most.
CLOSE = functools.partial(pytest.approx, rel=1e-5)
RUNS = "tests.integrations.trainer_runs"
NUMBERS = ("loss", "grad_norm", "learning_rate", "train_loss", "eval")
# Of each of them: what else is compared, beside the numbers of the log.
SCENARIOS: dict[str, tuple[str, ...]] = {
    "accumulation": (),
    "adafactor": (),
    "classification": (),
    "compute_loss_func": (),
    "config_optimizer": (),
    "config_scheduler": (),
    "frozen": ("squares",),
    "fused_loss": (),
    "generate": ("tokens", "training"),
    "gradient_checkpointing": (),
    "label_smoothing": (),
    "lora": ("after", "tokens"),
    "logging_steps": (),
    "mean_accumulation": (),
    "nan_filter": (),
    "padded": (),
    "predict": ("test_loss 27", "test_loss 1", "sums 27", "sums 1", "sums without labels"),
    "saved": ("squares",),
    "seq2seq": (),
    "stage1": (),
    "stopped_early": (),
    "uneven": (),
}
# Trainer logs the learning rate after the step. DeepSpeed's engine has moved its schedule by then.
MOVES_THE_SCHEDULE = ("config_optimizer", "config_scheduler")
ENDS_SHORT = ("classification", "uneven")


def run(kind: str, folder: Path, *names: str, devices: int = 8) -> dict[str, Any]:
    # One thread: torch's others wait busily for each other, where others work too.
    more = {"OMP_NUM_THREADS": "1"} if kind == "plain" else {}
    said = run_python("-m", RUNS, kind, str(folder), *names, devices=devices, **more)
    return json.loads(said.splitlines()[-1])


def same(ours: Any, plain: Any, *, name: str = "") -> None:
    """Asserts that numbers, nested in the same way, are those of plain Trainer."""
    if isinstance(plain, dict):
        assert ours.keys() == plain.keys(), name
        for key in plain:
            same(ours[key], plain[key], name=f"{name} {key}")
    elif plain and isinstance(plain, list) and isinstance(plain[0], dict | list):
        assert len(ours) == len(plain), name
        for index, (one, other) in enumerate(zip(ours, plain, strict=True)):
            same(one, other, name=f"{name}[{index}]")
    else:
        assert ours == CLOSE(plain), name


def same_run(ours: dict[str, Any], plain: dict[str, Any], *also: str) -> None:
    assert "error" not in ours, ours["error"]
    assert "error" not in plain, plain["error"]
    for key in (*NUMBERS, *also):
        same(ours[key], plain[key], name=key)


def test_a_trainer_trains_evaluates_and_saves_as_on_the_cpu(tmp_path: Path) -> None:
    # In the same processes: imports take longer than either.
    names = ("main", "dpo_short", "lengths")
    their_runs = run("plain", tmp_path / "plain", *names)
    our_runs = run("spmdzero", tmp_path / "ours", *names, "pretrained_3", "checkpointed")
    # TRL's trainer asks accelerate for collectives first, and joins two batches.
    same_run(our_runs["dpo_short"], their_runs["dpo_short"], "squares")
    # A length is a program: what is of another length than the first batch has one length.
    same_run(our_runs["lengths"], their_runs["lengths"], "squares")
    compiled = our_runs["lengths"]["compiled"]
    assert len(set(compiled)) <= 3, compiled
    ours, plain = our_runs["main"], their_runs["main"]
    same_run(ours, plain, "squares")
    assert len(ours["loss"]) == 10
    assert ours["loss"][-1] < ours["loss"][0] - 0.5
    assert len(ours["eval"]) == 2
    # Logged is each second step.
    assert ours["reads"][5] == ours["reads"][4]
    assert ours["reads"][6] > ours["reads"][5]
    assert set(ours["compiled"][2:]) == {ours["compiled"][2]}
    # `HfDeepSpeedConfig` says stage 3: `from_pretrained` reads into shards, which stay them.
    shards = our_runs["pretrained_3"]
    assert "error" not in shards, shards["error"]
    assert (shards["on_host"], shards["whole"]) == ([], [])
    assert shards["loss"][-1] < shards["loss"][0]
    # What transformers checkpoints holds less, draws the same masks, and is no Python at each step.
    checkpointed = our_runs["checkpointed"]
    assert "error" not in checkpointed, checkpointed["error"]
    before, after = checkpointed["without"], checkpointed["with"]
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    if current().compiler is not None:
        assert (before["traced"], after["traced"]) == (0, 0)
    assert after["bytes"] < before["bytes"] / 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [*SCENARIOS, "resumed_client", "best", "loaded"]
    return run("plain", tmp_path_factory.mktemp("plain"), *names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ours")


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    return run("spmdzero", folder, *SCENARIOS, "resumed", "resumed_client", "best")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_has_the_numbers_of_a_plain_trainer(
    ours: dict[str, Any], plain: dict[str, Any], name: str
) -> None:
    mine, theirs = ours[name], plain[name]
    if name in MOVES_THE_SCHEDULE:
        theirs["learning_rate"] = [*theirs["learning_rate"][1:], mine["learning_rate"][-1]]
    same_run(mine, theirs, *SCENARIOS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_step_after_the_third_compiles(ours: dict[str, Any], name: str) -> None:
    # A short last batch of an epoch is another program, which the fourth step needs first.
    steps = ours[name]["compiled"][3 if name in ENDS_SHORT else 2 :]
    assert set(steps) == {steps[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logging_steps", "nan_filter"])
def test_nothing_is_read_between_two_log_lines(ours: dict[str, Any], name: str) -> None:
    reads = ours[name]["reads"]
    # After steps 8 and 16 the engine looks what the devices have found.
    assert set(reads[10:15]) == {reads[10]}
    assert reads[15] > reads[14]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_unevenly_padded_labels_count_the_same_on_any_number_of_devices(
    plain: dict[str, Any], tmp_path: Path, devices: int
) -> None:
    names = ("padded", "label_smoothing", "uneven")
    found = run("spmdzero", tmp_path, *names, devices=devices)
    for name in names:
        same_run(found[name], plain[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resumed", "resumed_client"])
def test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(
    ours: dict[str, Any], name: str
) -> None:
    found = ours[name]
    for key in (*NUMBERS[:3], "weights"):
        assert found["again"][key] == found["straight"][key]
    assert len(found["again"]["compiled"]) == 5


@pytest.mark.slow
def test_a_run_goes_on_on_two_devices(
    ours: dict[str, Any], plain: dict[str, Any], folder: Path
) -> None:
    assert "error" not in ours["resumed_client"]
    found = run("spmdzero", folder, "resumed_here", devices=2)["resumed_here"]
    theirs = plain["resumed_client"]["straight"]
    for key in (*NUMBERS[:3], "squares"):
        same(found[key], theirs[key], name=key)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(
    ours: dict[str, Any], plain: dict[str, Any], folder: Path
) -> None:
    same_run(ours["best"], plain["best"], "sums", "squares")
    assert ours["best"]["best"] == str(folder / "best" / "checkpoint-3")
    # The fourth evaluation, after training, is of the first model.
    assert ours["best"]["sums"][3] == CLOSE(ours["best"]["sums"][0])
    assert ours["best"]["sums"][2] != CLOSE(ours["best"]["sums"][0])


@pytest.mark.slow
def test_plain_transformers_and_peft_read_what_was_saved(
    ours: dict[str, Any], plain: dict[str, Any], folder: Path
) -> None:
    assert "error" not in ours["saved"]
    assert "error" not in ours["lora"]
    found = run("plain", folder, "loaded")["loaded"]
    same(found, plain["loaded"])
    for name in ("save_model", "save_pretrained"):
        with safe_open(folder / name / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert {file.get_tensor(key).device.type for key in file.keys()} == {"cpu"}  # noqa: SIM118
    pickled = b"torch_xla" in (folder / "save_model" / "training_args.bin").read_bytes()
    assert not pickled


REFUSED = {
    "offload": "SpmdZeroConfigError: zero_optimization.offload_optimizer.device = nvme: no",
    "mismatched": "ValueError: Please correct the following DeepSpeed config values that mismatch",
    "unshared_rows": "SpmdZeroConfigError: train_micro_batch_size_per_gpu = 12: to this client",
    "trained_twice": "SpmdZeroUsageError: GPT2LMHeadModel: this engine was destroyed",
    "evaluated_first": "ValueError: ZeRO inference only makes sense with ZeRO Stage 3",
    "auto_find_batch_size": "SpmdZeroUsageError: auto_find_batch_size=True: Trainer doesn't know",
    "cast_to_evaluate": "SpmdZeroUsageError: bf16_full_eval=True would cast the parameters",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("spmdzero", tmp_path_factory.mktemp("refused"), *REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(refused: dict[str, Any], name: str) -> None:
    assert refused[name].get("error", "").startswith(REFUSED[name]), refused[name]
