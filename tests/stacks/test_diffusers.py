"""Runs diffusers' training scripts by accelerate with DeepSpeed, beside plain torch.

Noise and timesteps are drawn by the script, on its device. That is the CPU here, so one seed gives
both runs the same draws.
"""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.stacks import diffusion, runs
from tests.suites import sources

BATCHES = "--resolution 32 --train_batch_size 8 --learning_rate 1e-3"
UNCONDITIONAL = (
    "unconditional_image_generation/train_unconditional.py --train_data_dir pictures "
    f"--model_config_name_or_path unet {BATCHES} --num_epochs 2 --use_ema --lr_warmup_steps 2 "
    "--ddpm_num_inference_steps 10 --eval_batch_size 4 --save_images_epochs 1 "
    "--checkpointing_steps 5"
)
STEPS = f"{BATCHES} --max_train_steps 6 --seed 1"
SAMPLES = "--validation_epochs 1"
TEXT = (
    "text_to_image/train_text_to_image.py --pretrained_model_name_or_path sd --train_data_dir "
    f"pictures {STEPS} --use_ema --lr_warmup_steps 0 {SAMPLES} --validation_prompts r "
    "--checkpointing_steps 5"
)
LORA = (
    "text_to_image/train_text_to_image_lora.py --pretrained_model_name_or_path sd "
    f"--train_data_dir pictures {STEPS} --lr_warmup_steps 0 {SAMPLES} --validation_prompt r "
    "--num_validation_images 1"
)
TRANSFORMER = (
    "dreambooth/train_dreambooth_lora_sd3.py --pretrained_model_name_or_path sd3 --dataset_name "
    f"pictures --caption_column text --instance_prompt r {STEPS} {SAMPLES} --validation_prompt r "
    "--num_validation_images 1 --max_sequence_length 16 --checkpointing_steps 3"
)


class Scripts:
    """The scripts, in a folder with what they would download; plain torch runs each line once."""

    def __init__(self, folder: Path) -> None:
        source = sources.read_source(Path(__file__).parent / "diffusers" / "repository.toml")
        sources.fetch(source)
        self._root, self._out = source.root / "examples", folder
        self._hub = diffusion.write(folder / "hub")
        self._plain = dict[str, tuple[str, Path]]()
        self._variables = {"HF_HOME": str(folder / "home")}

    def plain(self, line: str) -> tuple[str, Path]:
        """What a script prints by plain torch, in one process, and its folder."""
        if line not in self._plain:
            words, out = self._words(line, f"plain_{len(self._plain)}")
            said = runs.by_torch(
                ["python", *words], cwd=self._hub, ACCELERATE_USE_CPU="true", **self._variables
            ).said
            self._plain[line] = said, out
        return self._plain[line]

    def ours(self, line: str, stage: int, into: str) -> tuple[str, Path]:
        """The same by spmdzero, on two devices."""
        words, out = self._words(line, into)
        # The scripts clip at 1, which accelerate leaves to DeepSpeed's config.
        plugin = {"zero_stage": stage, "gradient_clipping": 1.0, "zero3_init_flag": stage == 3}
        config = {
            "distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1,
            "mixed_precision": "no", "deepspeed_config": plugin,
        }  # fmt: skip
        path = self._out / f"stage_{stage}.yaml"
        path.write_text(json.dumps(config))
        launch = ["accelerate", "launch", "--config_file", str(path)]
        ended = runs.by_spmdzero([*launch, *words], cwd=self._hub, **self._variables)
        assert f"ZeRO-{stage}" in ended.said
        return ended.said, out

    def _words(self, line: str, into: str) -> tuple[list[str], Path]:
        script, *words = line.split()
        return [str(self._root / script), *words, "--output_dir", str(self._out / into)], (
            self._out / into
        )


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"))


def _losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step loss: ([\d.e-]+)", said)]


def _have_the_losses(ours: str, plain: str, steps: int) -> None:
    assert len(_losses(plain)) == steps
    print("\nlosses", *(f"{a} ({b})," for a, b in zip(_losses(ours), _losses(plain), strict=True)))
    # fp32: sums in another order.
    assert _losses(ours) == pytest.approx(_losses(plain), rel=1e-4)


def _have_the_weights(ours: Path, plain: Path) -> None:
    import torch
    from safetensors.torch import load_file

    found, wanted = load_file(ours), load_file(plain)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = tensor.float().abs().max().clamp(min=1e-3)
        # fp32: through Adam's first steps, which divide a gradient by itself.
        torch.testing.assert_close(
            found[name] / scale, tensor / scale, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n} {m}"
        )


def _have_the_samples(ours: Path, plain: Path, count: int, levels: int) -> None:
    found, wanted = _samples(ours), _samples(plain)
    assert len(wanted) == count
    assert found.keys() == wanted.keys()
    for name, picture in wanted.items():
        assert abs(found[name] - picture).max() <= levels, name


def _samples(folder: Path) -> dict[tuple[str, int], object]:
    """The pictures that a script has logged for TensorBoard, by name and step."""
    import numpy
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in folder.rglob("events*"):
        events = EventAccumulator(str(path), size_guidance={"images": 0})
        events.Reload()
        for tag in events.Tags()["images"]:
            for image in events.Images(tag):
                pixels = Image.open(io.BytesIO(image.encoded_image_string))
                found[tag, image.step] = numpy.asarray(pixels).astype(int)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unet_with_a_moving_average_is_that_of_plain_torch(stage: int, scripts: Scripts) -> None:
    (plain, wanted), (ours, out) = (
        scripts.plain(UNCONDITIONAL), scripts.ours(UNCONDITIONAL, stage, f"unet_{stage}"),
    )  # fmt: skip
    _have_the_losses(ours, plain, 10)
    name = "diffusion_pytorch_model.safetensors"
    # What is saved at the end is the average.
    for folder in ("checkpoint-5/unet", "checkpoint-5/unet_ema", "checkpoint-10/unet_ema", "unet"):
        _have_the_weights(out / folder / name, wanted / folder / name)
    # Rounded to levels of 255.
    _have_the_samples(out, wanted, 2, levels=1)


def test_a_moving_average_resumes_bit_for_bit(scripts: Scripts) -> None:
    straight, out = scripts.ours(UNCONDITIONAL, 2, "straight")
    again = out.with_name("again")
    shutil.copytree(out / "checkpoint-5", again / "checkpoint-5")
    resumed, _ = scripts.ours(
        f"{UNCONDITIONAL} --resume_from_checkpoint checkpoint-5", 2, again.name
    )
    assert _losses(resumed) == _losses(straight)[5:]
    name = "unet/diffusion_pytorch_model.safetensors"
    assert (again / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("stage", [2, 3])
def test_text_to_image_is_that_of_plain_torch(stage: int, scripts: Scripts) -> None:
    (plain, wanted), (ours, out) = scripts.plain(TEXT), scripts.ours(TEXT, stage, f"text_{stage}")
    _have_the_losses(ours, plain, 6)
    # Sampled by the average in bf16, which has eight bits.
    _have_the_samples(out, wanted, 2, levels=8)
    assert "UNet2DConditionModel was moved to the CPU" in ours
    _loads(out, "StableDiffusionPipeline", seed=0)


def test_text_to_image_with_lora_is_that_of_plain_torch(scripts: Scripts) -> None:
    (plain, wanted), (ours, out) = scripts.plain(LORA), scripts.ours(LORA, 3, "lora")
    _have_the_losses(ours, plain, 6)
    _have_the_samples(out, wanted, 3, levels=8)
    name = "pytorch_lora_weights.safetensors"
    _have_the_weights(out / name, wanted / name)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_transformer_with_lora_is_that_of_plain_torch(stage: int, scripts: Scripts) -> None:
    (plain, wanted), (ours, out) = (
        scripts.plain(TRANSFORMER), scripts.ours(TRANSFORMER, stage, f"transformer_{stage}"),
    )  # fmt: skip
    _have_the_losses(ours, plain, 6)
    _have_the_samples(out, wanted, 3, levels=8)
    name = "pytorch_lora_weights.safetensors"
    _have_the_weights(out / name, wanted / name)
    _have_the_weights(out / "checkpoint-3" / name, wanted / "checkpoint-3" / name)
    # Buffers come back as the same ones, so nothing is compiled after a sampling.
    assert "compiles its programs again" not in ours


def _loads(folder: Path, name: str, seed: int) -> None:
    import diffusers
    import numpy
    import torch

    pipeline = getattr(diffusers, name).from_pretrained(folder, safety_checker=None)
    draw = torch.Generator().manual_seed(seed)
    pixels = pipeline("r", num_inference_steps=2, generator=draw, output_type="np").images
    assert numpy.isfinite(pixels).all()
