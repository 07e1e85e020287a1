"""Runs DeepSpeedExamples' scripts beside the same scripts by DeepSpeed, in one process on a CPU."""

import os
import re
import socket
from pathlib import Path

import pytest

from tests.stacks import deepspeed_material, runs
from tests.suites import sources

CIFAR = "training/cifar/cifar10_deepspeed.py"
HELLO = "training/HelloDeepSpeed/train_bert_ds.py"
CHAT = "applications/DeepSpeed-Chat"
SFT = f"{CHAT}/training/step1_supervised_finetuning/main.py"
REWARD = f"{CHAT}/training/step2_reward_model_finetuning/main.py"
# `deepspeed` hands scripts their local rank. Rows are cut to one length: OPT's loss is the mean
# over the labels of the rows that it is given, and the mean of devices' means is that of all.
CHATS = (
    "--data_path local/jsonfile --data_split 8,2,0 --model_name_or_path opt --max_seq_len 16 "
    "--learning_rate 1e-3 --weight_decay 0.1 --per_device_train_batch_size 16 "
    "--per_device_eval_batch_size 8 --local_rank 0 --deepspeed"
)
BING = "training/bing_bert/deepspeed_train.py"
BINGS = (
    "--max_seq_length 32 --max_predictions_per_seq 4 --deepspeed --print_steps 1 --lr_schedule EE "
    "--use_nvidia_dataset --job_name bing"
)
LORA = "--lora_dim 4 --lora_module_name decoder.layers. --only_optimize_lora"


class Examples:
    """The scripts, in a folder that has what they would download; DeepSpeed runs each line once."""

    def __init__(self, folder: Path) -> None:
        path = Path(__file__).parent / "deepspeed_examples" / "repository.toml"
        source = sources.read_source(path)
        sources.fetch(source)
        self.root, self.folder = source.root, folder
        deepspeed_material.write(folder, self.root / CHAT)
        self._variables = {"PYTHONPATH": f"{sources.HERE.parents[1]}:{self.root / CHAT}"}
        self._theirs = dict[str, str]()

    def ours(self, script: str, line: str, status: int = 0) -> str:
        """What a script prints by spmdzero, on two devices."""
        words = [str(self.root / script), *line.split()]
        return runs.by_spmdzero(words, cwd=self.folder, status=status, **self._variables).said

    def theirs(self, script: str, line: str) -> str:
        """What it prints by DeepSpeed, which compiles its kernels in the first run: minutes."""
        key = f"{script} {line}"
        if key not in self._theirs:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            words = ["python", str(self.root / script), *line.split()]
            self._theirs[key] = runs.by_torch(
                words, cwd=self.folder, DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0",
                WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCH_EXTENSIONS_DIR=str(self.root.parent / "deepspeed_kernels"),
                OMP_NUM_THREADS=str(os.cpu_count()), **self._variables,
            ).said  # fmt: skip
        return self._theirs[key]


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return Examples(tmp_path_factory.mktemp("examples"))


def _losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?:step loss:|, loss =) ([\d.e-]+)", said)]


def _evaluated(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"ppl: [\d.]+, loss: ([\d.e-]+)", said)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cifar_has_the_losses_of_deepspeed(stage: int, examples: Examples) -> None:
    line = "--deepspeed --dtype fp32 --epochs 2 --stage"
    ours = examples.ours(CIFAR, f"{line} {stage}")
    theirs = examples.theirs(CIFAR, f"{line} 0")
    assert len(_losses(theirs)) == 10
    print("\ncifar", stage, _losses(ours), _losses(theirs))
    # fp32: sums in another order.
    assert _losses(ours) == pytest.approx(_losses(theirs), rel=1e-4)
    accuracies = re.compile(r"^Accuracy of .*$", re.MULTILINE)
    assert accuracies.findall(ours) == accuracies.findall(theirs) != []


def test_cifar_learns_in_bf16(examples: Examples) -> None:
    losses = _losses(examples.ours(CIFAR, "--deepspeed --dtype bf16 --epochs 2 --stage 2"))
    theirs = _losses(examples.theirs(CIFAR, "--deepspeed --dtype fp32 --epochs 2 --stage 0"))
    # bf16 has eight bits.
    assert losses == pytest.approx(theirs, rel=2e-2)


def test_cifar_learns_with_experts(examples: Examples) -> None:
    said = examples.ours(CIFAR, "--deepspeed --moe --num-experts 2 --moe-param-group --epochs 2")
    losses = _losses(said)
    # Which tokens find no place is drawn, so that DeepSpeed's own losses are others each time.
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("stage", "more"), [(2, ""), (3, ""), (2, LORA)])
def test_supervised_finetuning_has_the_losses_of_deepspeed(
    stage: int, more: str, examples: Examples
) -> None:
    line = f"{CHATS} {more} --dtype fp32 --print_loss"
    theirs = examples.theirs(SFT, f"{line} --data_output_path theirs_{bool(more)} --zero_stage 0")
    out = f"sft_{stage}_{bool(more)}"
    ours = examples.ours(
        SFT, f"{line} --data_output_path data_{out} --zero_stage {stage} --output_dir {out}"
    )
    assert len(_losses(theirs)) == 6
    # fp32: sums in another order.
    assert _losses(ours) == pytest.approx(_losses(theirs), rel=1e-4)
    assert len(_evaluated(theirs)) == 2
    assert _evaluated(ours) == pytest.approx(_evaluated(theirs), rel=1e-4)
    assert (examples.folder / out / "pytorch_model.bin").exists()


def _progress(said: str) -> list[tuple[float, ...]]:
    """Loss, rate and number of rows of each step of bing_bert."""
    found = re.findall(
        r"bing_bert_progress: step=\d+, loss=(\S+), lr=(\S+), sample_count=(\d+)", said
    )
    return [tuple(map(float, numbers)) for numbers in found]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bing_bert_has_the_losses_of_deepspeed(stage: int, examples: Examples) -> None:
    line = f"{BINGS} --cf bing/even.json"
    theirs = examples.theirs(
        BING, f"{line} --deepspeed_config bing/stage_0.json --output_dir bing_theirs"
    )
    ours = examples.ours(
        BING, f"{line} --deepspeed_config bing/stage_{stage}.json --output_dir bing_{stage}"
    )
    print("\nbing_bert", stage, _progress(ours), _progress(theirs))
    assert len(_progress(theirs)) == 8
    # fp32: sums in another order.
    for mine, its in zip(_progress(ours), _progress(theirs), strict=True):
        assert mine == pytest.approx(its, rel=1e-4)
    saved = examples.folder / f"bing_{stage}" / "saved_models" / "bing"
    assert (saved / "epoch2_step8").is_dir()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            BING,
            f"{BINGS} --cf bing/ragged.json --deepspeed_config bing/stage_2.json --output_dir no",
        ),
        (REWARD, f"{CHATS} --dtype fp32 --data_output_path reward --num_padding_at_beginning 0"),
        (HELLO, "--checkpoint_dir hello --dtype fp32 --h_dim 32 --num_heads 2 --num_iterations 3"),
    ],
)
def test_a_shape_that_depends_on_data_is_refused_with_its_line(
    script: str, line: str, examples: Examples
) -> None:
    said = examples.ours(script, line, status=1)
    assert "the shape of aten.nonzero.default depends on data" in said
    assert any(f"{name}.py:" in said for name in ("reward_model", "train_bert_ds", "modelingpreln"))
