"""`spmdzero run`: what a script sees and leaves is what `python` would show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._as_main import run_as_main
from tests.support.processes import ROOT, environment, run_python

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

# What it prints, and how it ends, is compared with `python`.
SEEN = """
import os, sys, __main__
print(__name__, __file__, __main__.__dict__ is globals(), sys.path[0])
print(sys.argv[1:], os.path.basename(sys.argv[0]), __spec__ and __spec__.name)
"""
ENDINGS = {
    "returns": "",
    "code": "sys.exit(7)",
    "message": "sys.exit('gone')",
    "nothing": "raise SystemExit",
    "error": "def inner():\n    raise ValueError('no')\ntry:\n    1 / 0\nfinally:\n    inner()",
    "syntax": "x = = 1",
    "own hook": "sys.excepthook = lambda kind, *_: print('mine', kind.__name__)\nraise KeyError",
}


def by_python(*words: str, cwd: Path) -> tuple[str, str, int]:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in; what a script changes in this process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    # Torch's own names the rank in a process that has a process group, as tests before leave one.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return tmp_path


def by_us(target: str, capfd: pytest.CaptureFixture[str], module: bool) -> tuple[str, str, int]:
    code = 0
    try:
        run_as_main(target, ["--help", "x"], module=module)
    except SystemExit as left:
        # What the interpreter does with it when it is not caught.
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        code = 1 if isinstance(left.code, str) else left.code or 0
    shown = capfd.readouterr()
    return shown.out, shown.err, code


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_sees_and_shows_what_it_does_under_python(
    ending: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "below").mkdir()
    (here / "below" / "script.py").write_text(SEEN + ENDINGS[ending])
    expected = by_python("below/script.py", "--help", "x", cwd=here)
    assert by_us("below/script.py", capfd, module=False) == expected


def test_a_module_sees_and_shows_what_it_does_under_python(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "package_of_a_test").mkdir()
    (here / "package_of_a_test" / "__init__.py").touch()
    (here / "package_of_a_test" / "module.py").write_text(SEEN + ENDINGS["error"])
    expected = by_python("-m", "package_of_a_test.module", "--help", "x", cwd=here)
    out, errors, code = by_us("package_of_a_test.module", capfd, module=True)
    # Python's own frames of -m stand above the script's.
    own = [line for line in expected[1].splitlines() if "runpy" not in line]
    assert (out, errors.splitlines(), code) == (expected[0], own, expected[2])


def test_a_refused_key_is_told_below_the_scripts_own_frames_alone(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A client's frames are a library's too, as these of json.
    text = (
        "import json\nfrom spmdzero.config import load_config\ndef start(*_):\n"
        '    load_config({"train_batch_size": 8, "zero_optimization": {"stage": 4}})\n'
        'json.loads("{}", object_pairs_hook=start)\n'
    )
    (here / "refused.py").write_text(text)
    _, errors, code = by_us("refused.py", capfd, module=False)
    assert code == 1
    first, *frames, last = errors.splitlines()
    assert first == "Traceback (most recent call last):"
    files = re.findall(r'File "(.*)", line (\d+)', "\n".join(frames))
    assert files == [(str(here / "refused.py"), "5")], errors
    assert last.startswith("spmdzero.errors.SpmdZeroConfigError: zero_optimization.stage = 4: ")
    assert last.endswith("Use stage 0, 1, 2 or 3.")


def test_an_interrupted_script_ends_as_the_shell_reports_it(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "script.py").write_text("raise KeyboardInterrupt")
    _, errors, code = by_us("script.py", capfd, module=False)
    assert (errors.splitlines()[-1], code) == ("KeyboardInterrupt", 130)


def test_what_is_not_there_is_named(here: Path) -> None:
    for target, module in (("gone.py", False), ("gone", True), ("os.gone", True)):
        with pytest.raises(SpmdZeroUsageError, match="gone"):
            run_as_main(target, [], module=module)


SCRIPT = """
import importlib, os, sys
import deepspeed

print(deepspeed.DeepSpeedEngine.__module__, os.environ["USE_TORCH_XLA"], sys.argv[1:])
print(deepspeed.get_accelerator().device_count())
for module in ("plan", "comm.comm", "launcher.launch", "moe.mappings"):
    try:
        importlib.import_module(f"deepspeed.{module}")
    except ModuleNotFoundError as error:
        print(error.name, str(error).partition(": ")[2][:39])
"""
SEEN_BY_IT = """\
spmdzero.compat.engine false ['--devices', '5', '-m']
3
deepspeed.plan spmdzero stands for it here, and has th
deepspeed.comm.comm spmdzero stands for it here, and has th
deepspeed.launcher.launch spmdzero stands for it here, and has th
deepspeed.moe.mappings spmdzero is data-parallel ZeRO; a pipel
"""


def test_the_command_gives_a_script_spmdzero_by_the_name_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["run", "--devices", "3", str(script), "--devices", "5", "-m"]
    assert run_python("-m", "spmdzero", *words) == SEEN_BY_IT


def test_a_command_of_a_package_runs_as_by_the_shell(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = here / "bin" / "a-command"
    found.parent.mkdir()
    found.write_text(f"#!{sys.executable}\n{SEEN}")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent), prepend=os.pathsep)
    expected = by_python(str(found), "--help", "x", cwd=here)
    assert by_us("a-command", capfd, module=False) == expected
    # A file of that name in the folder comes first.
    (here / "a-command").write_text("print('mine')")
    assert by_us("a-command", capfd, module=False)[0] == "mine\n"
    for name, reason in (("cat", "is no Python script"), ("no-such", "no command of that name")):
        with pytest.raises(SpmdZeroUsageError, match=f"^{name}: .*{reason}"):
            run_as_main(name, [], module=False)


CHILD = """
import os, sys
from importlib.metadata import version
if "--accelerate" in sys.argv:
    from accelerate.utils import is_deepspeed_available
    assert is_deepspeed_available()
named = version("deepspeed")
import deepspeed
print(deepspeed.DeepSpeedEngine.__module__, named == deepspeed.__version__)
print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")), sys.own_customs)
"""


STARTS = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nproc_per_node", "8"],
        # As programs start it that have a launcher of their own, ms-swift for example.
        ["python", "-m", "torch.distributed.run", "--nproc_per_node", "8"],
        pytest.param(
            [
                "accelerate",
                "launch",
                "--use_deepspeed",
                "--num_processes",
                "8",
                "--num_machines",
                "1",
                "--zero_stage",
                "2",
                "--mixed_precision",
                "no",
                "--dynamo_backend",
                "no",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_launchers_child_knows_deepspeed_and_is_one_for_all_devices(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    flag = f"--{words[0]}"
    if words[0] == "python":
        (tmp_path / "starts.py").write_text(STARTS)
        words = [str(tmp_path / "starts.py"), *words[1:]]
    # An environment may have such a module of its own.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own_customs = 'own'\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "spmdzero", "run", "--devices", "8", *words),
            *(str(tmp_path / "child.py"), flag),
        ],
        env=environment(PYTHONPATH=paths),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "spmdzero.compat.engine True\n0 0 1 own\n", done.stderr[-2000:]
    assert "8 processes on each host were asked for" in done.stderr


PLACED = """
import os
import torch.distributed as dist
from transformers import TrainingArguments
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
print(*(os.environ.get(name) for name in names))
if "LOCAL_RANK" in os.environ:
    arguments = TrainingArguments("out", report_to=[], deepspeed=CONFIG)
    print(arguments.parallel_mode, arguments.world_size)
    dist.is_initialized() or dist.init_process_group("gloo")
    print(dist.get_rank(), dist.get_world_size())
"""


@pytest.mark.parametrize(
    ("told", "named"),
    [({}, True), ({"SLURM_NTASKS": "2"}, False), ({"RANK": "1"}, False)],
    ids=["alone", "Slurm", "launched"],
)
def test_a_process_that_is_surely_alone_has_a_launchers_variables(
    told: dict[str, str], named: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLACED)
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in environment().items() if name not in places}
    done = subprocess.run(
        [sys.executable, "-m", "spmdzero", "run", "--devices", "8", str(script)],
        env=variables | told, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    if not named:
        assert first.split()[1:] == ["None"] * 4
        return
    *place, port = first.split()
    assert place == ["0", "0", "1", "127.0.0.1"]
    assert int(port) > 0
    assert rest == ["ParallelMode.DISTRIBUTED 1", "0 1"]


@pytest.mark.parametrize("makes", [False, True])
def test_a_program_that_makes_no_engine_is_told_so(makes: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + ("import deepspeed\n" * makes)
        + (
            "deepspeed.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 8})\n"
            * makes
        )
        + "for _ in range(2):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = [sys.executable, "-m", "spmdzero", "run", "--devices", "8", str(script)]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr.count("SGD.step() trains by plain torch") == (0 if makes else 1)
