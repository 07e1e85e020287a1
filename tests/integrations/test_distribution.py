"""`pip install spmdzero-deepspeed`: one environment, in which it is installed and taken away."""

import importlib.metadata
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import setuptools
import torch

from spmdzero.integrations._install import NAME, VERSION
from tests.integrations.environments import PROJECT, Environment, stand_in, table
from tests.support.processes import ROOT

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

# A script as DeepSpeed's users have it. What it prints comes last.
SCRIPT = """
import argparse, importlib.metadata, json, os, sys
switch = os.environ["USE_TORCH_XLA"]
import deepspeed, torch
from torch.nn.functional import mse_loss

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(2):
    loss = mse_loss(engine(torch.ones(8, 8)), torch.zeros(8, 8, device=engine.device))
    engine.backward(loss)
    engine.step()
print(json.dumps({
    "file": deepspeed.__file__,
    "engine": type(engine).__module__,
    "versions": [deepspeed.__version__, importlib.metadata.version("deepspeed")],
    "switch": switch,
    "schedules": deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES,
    "devices": engine.dp_world_size,
    "steps": engine.global_steps,
    "local_rank": args.local_rank,
    "saved": open(f"/tmp/{os.getpid()}.deepspeed").read(),
    "argv": sys.argv[1:],
    "place": {name: os.environ[name] for name in
              ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
}))
sys.exit(3)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.install()
    return made


def test_deepspeeds_launcher_line_trains_an_unchanged_script_in_one_process(
    installed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    line = "--num_gpus 4 --launcher pdsh --master_port 29511 --save_pid --enable_each_rank_log logs"
    line += " train.py --deepspeed_config ds.json"
    done = installed.run("deepspeed", *line.split(), cwd=tmp_path, PJRT_DEVICE="CPU")
    assert done.returncode == 3, done.stderr
    assert "--launcher has no meaning: no other host is reached from here" in done.stderr
    pid = re.fullmatch(r"launcher pid: (\d+)\n", done.stdout)
    assert pid is not None
    (log,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"\d{14}_rank0\.log", log.name)
    found = json.loads(log.read_text().splitlines()[-1])
    assert found.pop("saved") == pid[1]
    assert not Path(f"/tmp/{pid[1]}.deepspeed").exists()
    assert found == {
        "file": str(installed.site / "deepspeed.py"),
        "engine": "spmdzero.compat.engine",
        "versions": [VERSION, VERSION],
        "switch": "false",
        "schedules": [
            *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
        ],
        "devices": 4,
        "steps": 2,
        "local_rank": 0,
        "argv": ["--local_rank=0", "--deepspeed_config", "ds.json"],
        "place": {
            **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
        },
    }


def test_it_refuses_to_stand_beside_the_other_and_says_how_to_choose(
    installed: Environment,
) -> None:
    theirs = stand_in(installed.site)
    look = "import importlib.util as util; print(util.find_spec('deepspeed') is not None, end='');"
    done = installed.run("python", "-c", look + "import deepspeed")
    for path in theirs:
        shutil.rmtree(path)
    # What only asks whether it is there, as accelerate does while it is imported, is not stopped.
    assert done.stdout == "True"
    assert "ImportError: this environment has two packages of the name deepspeed" in done.stderr
    for command in (
        "pip uninstall spmdzero-deepspeed; pip uninstall deepspeed",
        "pip uninstall spmdzero-deepspeed; pip install --force-reinstall --no-deps deepspeed",
        "spmdzero run train.py",
        "spmdzero.integrations.install()",
    ):
        assert command in done.stderr


@pytest.mark.slow
def test_the_commands_that_choose_leave_the_other_or_ours(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    clean = made.names()
    stand_in(made.site)
    made.install()
    assert made.names() - clean == {
        *("deepspeed", "deepspeed-0.19.8.dist-info"),
        *("ds_report", "deepspeed.py", "deepspeed.egg-info"),
        *("_spmdzero_deepspeed.py", "spmdzero_deepspeed.pth"),
        f"spmdzero_deepspeed-{importlib.metadata.version('spmdzero')}.dist-info",
    }
    made.pip("uninstall", "--yes", "spmdzero-deepspeed")
    code = "import deepspeed, os; print(deepspeed.__doc__, os.environ.get('USE_TORCH_XLA'))"
    assert made.run("python", "-c", code).stdout == "The other one. None\n"
    made.pip("uninstall", "--yes", "deepspeed")
    assert made.names() == clean
    made.install()
    # What requires DeepSpeed finds it: pip has nothing to download.
    made.pip("install", "--no-index", "deepspeed>=0.16")
    made.pip("check")


TRAINER = """
import json, torch
from transformers import (
    GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
)

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 128, "n_positions": 32}
none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **none))
ids = (torch.randint(0, 128, (128, 1)) + torch.arange(32)) % 128
trainer = Trainer(
    model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids]
)
trainer.train()
kept = ("loss", "grad_norm")
steps = [[log[name] for name in kept] for log in trainer.state.log_history if "loss" in log]
print(json.dumps([type(trainer.model_wrapped).__name__, steps]))
"""


@pytest.mark.slow
def test_deepspeeds_launcher_line_trains_an_unchanged_trainer_as_the_plain_one_does(
    installed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config = auto | {"optimizer": optimizer, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"gradient_clipping": "auto"}))
    options = "train.py --per_device_train_batch_size 16 --max_steps 5 --logging_steps 1"
    options += " --learning_rate 1e-3 --report_to none --save_strategy no --output_dir out"
    line = f"--num_gpus 8 {options} --deepspeed ds.json"
    done = installed.run("deepspeed", *line.split(), cwd=tmp_path, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    plain = installed.run("python", *options.split(), "--use_cpu", "true", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    engine, steps = json.loads(done.stdout.splitlines()[-1])
    module, expected = json.loads(plain.stdout.splitlines()[-1])
    assert (engine, module) == ("ClientEngine", "GPT2LMHeadModel")
    assert len(steps) == 5
    # fp32 in another order of sums, over a few steps.
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_accelerate_launch_starts_a_script_with_it(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import accelerate, torch
accelerator = accelerate.Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    accelerator.backward(model(rows).mean())
    optimizer.step()
print(accelerator.distributed_type, type(model).__name__, model.dp_world_size, model.global_steps)
""")
    (tmp_path / "accelerate.yaml").write_text("""
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 1}
mixed_precision: 'no'
num_machines: 1
num_processes: 1
main_process_port: 0
""")
    devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    line = "-m accelerate.commands.launch --config_file accelerate.yaml train.py"
    done = installed.run("python", *line.split(), cwd=tmp_path, **devices)
    assert done.returncode == 0, done.stderr
    assert "DistributedType.DEEPSPEED ClientEngine 8 1\n" in done.stdout


@pytest.mark.slow
def test_clients_find_it_without_a_word_in_the_script(installed: Environment) -> None:
    code = """
        import accelerate.utils, transformers.integrations, lightning.fabric.strategies.deepspeed
        from transformers.utils.versions import require_version
        require_version("deepspeed>=0.9.3")
        print(accelerate.utils.is_deepspeed_available(), accelerate.utils.is_torch_xla_available(),
              transformers.integrations.is_deepspeed_available(),
              bool(lightning.fabric.strategies.deepspeed._DEEPSPEED_GREATER_EQUAL_0_16))
    """
    done = installed.run("python", "-c", textwrap.dedent(code))
    assert done.stdout == "True False True True\n", done.stderr


@pytest.mark.slow
def test_its_other_commands_run(installed: Environment) -> None:
    done = installed.run("python", "-m", "deepspeed.launcher.runner", "--help")
    assert done.stdout.startswith("usage: deepspeed [-h] [-H HOSTFILE]"), done.stderr
    assert "versions: torch" in installed.run("ds_report", PJRT_DEVICE="CPU").stdout


def test_versions_are_said_once() -> None:
    project, whole = table(PROJECT)["project"], table(ROOT)["project"]
    assert project["version"] == whole["version"]
    assert project["dependencies"] == [f"spmdzero=={whole['version']}"]
    assert project["requires-python"] == whole["requires-python"]
    metadata = (PROJECT / "DEEPSPEED-METADATA").read_text()
    assert f"\nName: {NAME}\nVersion: {VERSION}\n" in metadata


def test_spmdzeros_own_wheel_has_no_package_of_that_name() -> None:
    options = table(ROOT)["tool"]["setuptools"]["packages"]["find"]
    found = setuptools.find_namespace_packages(str(ROOT), **options)
    assert "spmdzero.integrations" in found
    assert "spmdzero.integrations.launcher" in found
    assert [name for name in found if "distribution" in name] == []
