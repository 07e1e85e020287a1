"""Runs transformers' examples/pytorch and accelerate's examples/ with DeepSpeed's configs."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.stacks import hub, runs
from tests.suites import sources

HERE = Path(__file__).parent / "examples"
BATCHES = "--per_device_train_batch_size 8 --per_device_eval_batch_size 8"
TRAINER = (
    f"--do_train --do_eval {BATCHES} --max_steps 6 --save_steps 3 --logging_steps 1 "
    "--report_to none"
)
LOOP = f"{BATCHES} --max_train_steps 6 --seed 1"
TEXT = (
    "--model_name_or_path llama --train_file text/train.txt "
    "--validation_file text/validation.txt --block_size 64 --learning_rate 1e-2"
)
MRPC = "--model_name_or_path bert-base-cased --task_name mrpc --learning_rate 1e-3"
TRANSLATION = (
    "--model_name_or_path t5 --train_file pairs/train.json --validation_file "
    "pairs/validation.json --test_file pairs/validation.json --source_lang en --target_lang ro "
    "--max_source_length 32 --max_target_length 16 --max_eval_samples 11 --max_predict_samples 8 "
    "--learning_rate 1e-3 --do_predict --predict_with_generate"
)
SPEECH = (
    "--model_name_or_path whisper --dataset_name speech --eval_split_name test "
    "--generation_max_length 8 --max_eval_samples 11 --learning_rate 1e-3 "
    "--predict_with_generate --freeze_feature_encoder False"
)
PICTURES = (
    "--model_name_or_path vit --train_dir pictures/train --validation_dir pictures/validation "
    "--learning_rate 1e-3 --remove_unused_columns False"
)
# Of transformers' examples/pytorch, those of Trainer with `--deepspeed`.
BY_TRAINER = {
    "run_clm": f"language-modeling/run_clm.py {TEXT} {TRAINER}",
    "run_glue": f"text-classification/run_glue.py {MRPC} {TRAINER}",
    "run_translation": f"translation/run_translation.py {TRANSLATION} {TRAINER}",
    "run_image_classification": (
        f"image-classification/run_image_classification.py {PICTURES} {TRAINER}"
    ),
    "run_speech_recognition_seq2seq": (
        f"speech-recognition/run_speech_recognition_seq2seq.py {SPEECH} {TRAINER}"
    ),
}
# Loops on accelerate, of transformers' examples/pytorch and of accelerate's examples/.
BY_ACCELERATE = {
    "run_clm_no_trainer": f"language-modeling/run_clm_no_trainer.py {TEXT} {LOOP}",
    "run_glue_no_trainer": f"text-classification/run_glue_no_trainer.py {MRPC} {LOOP}",
    "run_image_classification_no_trainer": (
        f"image-classification/run_image_classification_no_trainer.py {LOOP} "
        "--model_name_or_path vit --train_dir pictures/train --validation_dir pictures/validation "
        "--learning_rate 1e-3"
    ),
    "nlp_example": "nlp_example.py",
    "complete_nlp_example": "complete_nlp_example.py --output_dir {out}",
    "gradient_accumulation": "by_feature/gradient_accumulation.py --gradient_accumulation_steps 2",
    "checkpointing": "by_feature/checkpointing.py --checkpointing_steps 6 --output_dir {out}",
}
# A row takes two minutes; stage 3 differs by where weights are loaded and gathered.
AT_STAGE_3 = ("run_clm", "run_glue", "run_clm_no_trainer", "nlp_example")


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run of an example.

    Attributes:
        said: what it printed.
        folder: of its output.
    """

    said: str
    folder: Path

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        if (self.folder / "trainer_state.json").exists():
            return runs.logged(self.folder)
        return [float(loss) for loss in re.findall(r"step loss: ([\d.e-]+)", self.said)]

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of its evaluation."""
        results = self.folder / "all_results.json"
        if results.exists():
            told = json.loads(results.read_text())
            timed = ("runtime", "per_second", "flos", "train_loss", "epoch")
            return {name: value for name, value in told.items() if not name.endswith(timed)}
        told = re.findall(r"(?:'(?:accuracy|f1)'|^epoch \d+): ([\d.]+)", self.said, re.MULTILINE)
        return {str(index): float(value) for index, value in enumerate(told)}


class Examples:
    """The examples in a folder that has what they would download; plain torch runs each once."""

    def __init__(self, folder: Path) -> None:
        found = {path.stem: sources.read_source(path) for path in HERE.glob("*.toml")}
        for source in found.values():
            sources.fetch(source)
        self.accelerate = found["accelerate"].root / "examples"
        self._folders = (found["transformers"].root / "examples/pytorch", self.accelerate)
        self.hub = hub.write(folder / "hub", found["evaluate"].root / "metrics")
        self._out, self._plain = folder, dict[str, Ran]()
        self._variables = {"HF_HOME": str(folder / "home")}

    def plain(self, line: str) -> Ran:
        """Runs an example by plain torch, in one process, on the CPU."""
        if line not in self._plain:
            words, out = self._words(line, f"plain_{len(self._plain)}")
            by_cpu = ["--use_cpu"] if "--save_steps" in words else []
            ended = runs.by_torch(
                ["python", *words, *by_cpu], cwd=self.hub, ACCELERATE_USE_CPU="true",
                **self._variables,
            )  # fmt: skip
            self._plain[line] = Ran(ended.said, out)
        return self._plain[line]

    def ours(self, line: str, into: str, *, by: list[str] | None = None, devices: int = 2) -> Ran:
        """Runs an example by spmdzero, where `by` is the launcher's command and its options."""
        words, out = self._words(line, into)
        ended = runs.by_spmdzero(
            [*(by or []), *words], cwd=self.hub, devices=devices, **self._variables
        )
        return Ran(ended.said, out)

    def launcher(self, stage: int | None, **keys: object) -> list[str]:
        """`accelerate launch` with these keys of `deepspeed_config`, and with those of a stage."""
        # A norm that nothing has: 0.0 is left out by accelerate, and DeepSpeed's default is 1.0.
        plugin = {"zero_stage": stage, "gradient_clipping": 1e9, "zero3_init_flag": stage == 3}
        config = {
            "distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1,
            "deepspeed_config": (plugin if stage else {}) | keys,
        }  # fmt: skip
        # Of a config file its own precision holds.
        config |= {"mixed_precision": "no"} if stage else {}
        path = self._out / f"launcher_{len(list(self._out.glob('launcher_*')))}.yaml"
        path.write_text(json.dumps(config))
        return ["accelerate", "launch", "--config_file", str(path)]

    def _words(self, line: str, into: str) -> tuple[list[str], Path]:
        out = self._out / into
        script, *words = shlex.split(line.replace("{out}", str(out)))
        (path,) = [folder / script for folder in self._folders if (folder / script).exists()]
        if path.parents[1] == self._folders[0]:
            words += ["--output_dir", str(out)]
        return [str(path), *words], out


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return Examples(tmp_path_factory.mktemp("examples"))


def _rows(lines: dict[str, str]) -> list[tuple[str, int]]:
    return [(name, 2) for name in lines] + [(name, 3) for name in lines if name in AT_STAGE_3]


def _json(folder: Path, stage: int, **keys: object) -> str:
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": {"stage": stage}, **dict.fromkeys(auto, "auto"), **keys}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return str(folder / "ds_config.json")


def _is_plain(ours: Ran, plain: Ran, steps: int) -> None:
    assert len(plain.losses) == steps
    print("\nlosses", *(f"{a} ({b})," for a, b in zip(ours.losses, plain.losses, strict=True)))
    print("measured", ours.measured, plain.measured)
    # fp32: sums in another order, through the steps of a large learning rate.
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert plain.measured
    assert ours.measured == pytest.approx(plain.measured, rel=1e-4)


@pytest.mark.parametrize(("name", "stage"), _rows(BY_TRAINER))
def test_a_script_of_trainer_is_that_of_plain_torch(
    name: str, stage: int, examples: Examples, tmp_path: Path
) -> None:
    plain = examples.plain(BY_TRAINER[name])
    with_config = f"{BY_TRAINER[name]} --deepspeed {_json(tmp_path, stage)}"
    ours = examples.ours(with_config, f"{name}_{stage}")
    _is_plain(ours, plain, 6)
    assert f"ZeRO-{stage}" in ours.said
    assert (ours.folder / "model.safetensors").exists()
    for written in ours.folder.glob("generated_predictions.txt"):
        assert written.read_text() == (plain.folder / written.name).read_text()


@pytest.mark.parametrize(("name", "stage"), _rows(BY_ACCELERATE))
def test_a_loop_of_accelerate_is_that_of_plain_torch(
    name: str, stage: int, examples: Examples
) -> None:
    plain = examples.plain(BY_ACCELERATE[name])
    accumulated = {"gradient_accumulation_steps": 2} if name == "gradient_accumulation" else {}
    by = examples.launcher(stage, **accumulated)
    ours = examples.ours(BY_ACCELERATE[name], f"{name}_{stage}", by=by)
    _is_plain(ours, plain, 6 if "no_trainer" in name else 12)
    assert f"ZeRO-{stage}" in ours.said
    assert (ours.folder / "model.safetensors").exists() or "no_trainer" not in name


def test_a_loop_takes_a_config_file_of_deepspeed(examples: Examples, tmp_path: Path) -> None:
    line = f"by_feature/deepspeed_with_config_support.py {TEXT} {LOOP} --output_dir {{out}}"
    plain = examples.plain(line)
    by = examples.launcher(None, deepspeed_config_file=_json(tmp_path, 2, gradient_clipping=0.0))
    # It ends with an evaluation of its best checkpoint, whose loss has to be that of before.
    ours = examples.ours(f"{line} --load_best_model", "config_support", by=by)
    _is_plain(ours, plain, 6)


@pytest.mark.parametrize("template", ["zero_stage1", "zero_stage2", "zero_stage3_offload"])
def test_accelerates_templates_train_with_optimizer_schedule_and_fp16(
    template: str, examples: Examples
) -> None:
    line = f"by_feature/deepspeed_with_config_support.py {TEXT} {LOOP} --output_dir {{out}}"
    config = examples.accelerate / f"deepspeed_config_templates/{template}_config.json"
    by = examples.launcher(None, deepspeed_config_file=str(config))
    ours, plain = examples.ours(line, template, by=by), examples.plain(line)
    print("\n", template, ours.losses, ours.measured)
    # fp16 has 11 bits; later steps have a schedule of warm-up that the script's own has not. At
    # stage 3 transformers draws new embeddings to fill them with the old, and batches are others.
    if "stage3" not in template:
        assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-3)
    assert ours.losses[-1] < 0.9 * ours.losses[0]


@pytest.mark.parametrize("name", ["cv_example", "complete_cv_example"])
def test_a_resnet_on_one_device_is_that_of_plain_torch(name: str, examples: Examples) -> None:
    # On two a batch norm has the statistics of each one's rows, as with DeepSpeed.
    line = f"{name}.py --data_dir pictures/flat"
    plain = examples.plain(line)
    ours = examples.ours(line, name, by=examples.launcher(2), devices=1)
    _is_plain(ours, plain, 5)


def test_run_clm_resumes_bit_for_bit(examples: Examples, tmp_path: Path) -> None:
    line = f"{BY_TRAINER['run_clm']} --deepspeed {_json(tmp_path, 3)}"
    straight = examples.ours(line, "straight")
    checkpoint = straight.folder / "checkpoint-3"
    again = examples.ours(f"{line} --resume_from_checkpoint {checkpoint}", "again")
    assert again.losses == straight.losses
    assert again.measured == straight.measured


def test_a_loop_resumes_bit_for_bit_after_an_epoch(examples: Examples) -> None:
    line = BY_ACCELERATE["run_glue_no_trainer"].replace("--max_train_steps 6", "")
    line += " --pad_to_max_length --max_length 64 --num_train_epochs 2 --checkpointing_steps epoch"
    straight, again = _resumed(line, "epoch_0", examples)
    assert len(straight) == 24
    assert again == straight[12:]


def test_rows_of_other_lengths_resume_after_an_epoch(examples: Examples) -> None:
    line = BY_ACCELERATE["checkpointing"].replace("--checkpointing_steps 6", "")
    straight, again = _resumed(f"{line} --checkpointing_steps epoch", "epoch_0", examples)
    assert len(straight) == 12
    # fp32, as above: a process pads once it has seen two lengths, and its first batch is as it was.
    assert again == pytest.approx(straight[6:], rel=1e-4)


def _resumed(line: str, checkpoint: str, examples: Examples) -> tuple[list[float], list[float]]:
    name, by = Path(line.split()[0]).stem, examples.launcher(2)
    straight = examples.ours(line, f"{name}_straight", by=by)
    resumed = f"{line} --resume_from_checkpoint {straight.folder / checkpoint}"
    return straight.losses, examples.ours(resumed, f"{name}_again", by=by).losses


def test_a_loop_resumes_within_an_epoch_as_by_plain_torch(examples: Examples) -> None:
    # Batches are drawn anew there, as accelerate does it without a seedable sampler.
    line = f"{BY_ACCELERATE['run_clm_no_trainer']} --checkpointing_steps 3"
    plain = examples.plain(line)
    plain = examples.plain(f"{line} --resume_from_checkpoint {plain.folder / 'step_3'}")
    by = examples.launcher(2)
    straight = examples.ours(line, "within_straight", by=by)
    resumed = f"{line} --resume_from_checkpoint {straight.folder / 'step_3'}"
    _is_plain(examples.ours(resumed, "within_again", by=by), plain, 3)
