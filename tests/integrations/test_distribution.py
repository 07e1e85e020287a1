"""`pip install spmdzero-deepspeed`: one environment, in which it is installed and taken away."""

import importlib.metadata
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import setuptools

from spmdzero.integrations._install import NAME, VERSION
from tests.integrations.environments import PROJECT, Environment, stand_in, table
from tests.support.processes import ROOT

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
        "engine": "spmdzero.engine._engine",
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
