"""The launcher's line: each option of DeepSpeed's is honoured, or refused, or said to do nothing.

tests/integrations/test_distribution.py runs one.
"""

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher import _options, parse_args, runner
from spmdzero.integrations.launcher._commands import Remote, Script, over_ssh
from spmdzero.integrations.launcher._hosts import Place, filtered, place_of, read_hostfile
from tests.support.processes import ROOT, environment, free_port

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

HOSTS = "# two machines\nworker-0 slots=4\n\nworker-1 slots=2\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    file = tmp_path / "hosts"
    file.write_text(HOSTS)
    return str(file)


def place(*words: str) -> Place:
    return place_of(parse_args([*words, "train.py"]), virtual_devices=8)


def refused(*words: str) -> str:
    options = parse_args([*words, "train.py"])
    try:
        _options.judge(options)
        place_of(options, virtual_devices=8)
    except SpmdZeroUsageError as error:
        return str(error)
    pytest.fail(f"{words} is accepted")


def test_a_line_without_hosts_is_this_one_with_all_of_its_devices() -> None:
    alone = Place(rank=0, hosts=1, address="127.0.0.1", devices=None, chosen=False)
    assert place() == alone
    assert place("--num_nodes", "1") == alone
    assert place("--include", "localhost") == alone
    assert place("--no_ssh", "--node_rank", "0") == alone


def test_devices_are_those_that_the_line_asks_for(hostfile: str) -> None:
    asked = {
        ("--num_gpus", "3"): (3, False),
        ("--num_accelerators", "3"): (3, False),
        ("--include", "localhost:1,5"): (2, True),
        ("--exclude", "localhost:0"): (7, True),
        ("-H", hostfile, "--num_nodes", "1"): (4, False),
        ("-H", hostfile, "-i", "worker-1"): (2, False),
        ("-H", hostfile, "-e", "worker-1@worker-0:0,3"): (2, True),
    }
    found = {words: place(*words) for words in asked}
    assert {words: (p.devices, p.chosen) for words, p in found.items()} == asked
    assert {p.hosts for p in found.values()} == {1}


def test_without_ssh_each_host_has_its_place(hostfile: str) -> None:
    line = ("-H", hostfile, "--no_ssh", "--node_rank")
    assert place(*line, "0") == Place(0, 2, "worker-0", devices=4, chosen=False)
    assert place(*line, "1") == Place(1, 2, "worker-0", devices=2, chosen=False)
    # What `accelerate launch` writes for its launcher `nossh`.
    told = place(*line, "1", "--num_gpus", "1", "--master_addr", "10.0.0.7")
    assert told == Place(1, 2, "10.0.0.7", devices=1, chosen=False)


def test_several_hosts_are_refused_with_what_to_do_on_each(hostfile: str) -> None:
    said = refused("-H", hostfile)
    assert said.startswith("worker-0, worker-1 are 2 hosts, and this starts one process, on this")
    assert "gcloud compute tpus tpu-vm ssh NAME --worker=all" in said
    assert "with --no_ssh, --node_rank and --master_addr" in said
    assert "no hostfile says which" in refused("--num_nodes", "2")


def test_lines_that_contradict_themselves_are_refused(hostfile: str, tmp_path: Path) -> None:
    assert "exclude each other" in refused("-i", "localhost:0", "-e", "localhost:1")
    assert "exclude --include" in refused("-i", "localhost:0", "--num_gpus", "1")
    assert "localhost with 8 slots" in refused("-i", "worker-0")
    assert "localhost with 8 slots" in refused("-i", "localhost:8")
    assert "write NAME[:SLOT" in refused("-i", "localhost:a")
    assert "leaves no device" in refused("-e", "localhost")
    assert "--node_rank must be one of 0 to 1" in refused("-H", hostfile, "--no_ssh")
    assert "Leave one" in refused("--module", "--no_python")
    assert "on another host by ssh" in refused("--force_multi")
    assert "no autotuner" in refused("--autotuning", "run")
    for text, said in {
        "worker-0\n": "write `NAME slots=NUMBER`",
        "a slots=1\na slots=2\n": "this host is there already",
        "# nobody\n": "names no host",
        "-oProxyCommand=true slots=1\n": "no host's name begins with a dash",
    }.items():
        (tmp_path / "bad").write_text(text)
        assert said in refused("-H", str(tmp_path / "bad"))


def test_what_a_host_is_called_is_no_option_of_ssh() -> None:
    script, slots = Script(words=["train.py"]), {"-oProxyCommand=true": [0]}
    (command,) = over_ssh(script, slots, address="a", port=1, remote=Remote())
    assert command.words[-3:-1] == ["--", "-oProxyCommand=true"]


def test_the_file_of_the_process_id_is_not_written_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    link = Path("/tmp", f"{os.getpid()}.deepspeed")
    link.symlink_to(mine)
    try:
        with pytest.raises(SpmdZeroUsageError, match=r"--save_pid: .* can't be written"):
            runner._save_pid()
    finally:
        link.unlink()
    assert mine.read_text() == "precious"


def test_options_without_meaning_are_said_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = "--launcher openmpi --launcher_args a --no_ssh_check --ssh_port 2 --venv_script v"
    line += " --bind_cores_to_rank --bind_core_list 0-3 --node_rank 0 train.py"
    with caplog.at_level(logging.INFO, "spmdzero"):
        _options.judge(parse_args(line.split()))
        place("--hostfile", "nowhere")
    said = re.findall(r"--(\w+) (?:has no meaning|nowhere)", caplog.text)
    assert sorted(said) == sorted([*_options._WITHOUT_MEANING, "node_rank", "hostfile"])
    caplog.clear()
    with caplog.at_level(logging.INFO, "spmdzero"):
        _options.judge(parse_args(["train.py", "--launcher", "the script's own"]))
    assert caplog.text == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to launch from; what the launcher changes in this process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    # The name stays DeepSpeed's own in the process of the tests.
    monkeypatch.setattr(runner, "install", lambda: None)
    return tmp_path


def test_the_script_reads_its_place_and_options_as_from_deepspeeds_launcher(folder: Path) -> None:
    code = "import json, os, pathlib, sys\n"
    code += "pathlib.Path('seen').write_text(json.dumps([sys.argv[1:], {**os.environ}]))"
    (folder / "launched_script.py").write_text(code)
    for words, own in {
        ("launched_script.py", "--x"): ["--local_rank=0", "--x"],
        ("--no_local_rank", "launched_script.py", "--module"): ["--module"],
        ("--module", "launched_script", "--x"): ["--local_rank=0", "--x"],
    }.items():
        runner.main(["--num_gpus", "2", "--master_port", "1234", *words])
        arguments, variables = json.loads((folder / "seen").read_text())
        assert arguments == own
        told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        told |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "CPU_NUM_DEVICES": "2"}
        assert {name: variables[name] for name in told} == told


def test_a_refused_line_ends_with_one_sentence_and_no_traceback(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (["--autotuning", "tune", "x.py"], ["gone.py"], ["--no_python", "gone"]):
        with pytest.raises(SystemExit, match="2"):
            runner.main(words)
        shown = capfd.readouterr().err
        assert len(shown.splitlines()) == 1
        assert shown.startswith("deepspeed: ")


def test_chips_of_a_host_are_driven_by_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner.runtime, "platform", lambda: "TPU")
    monkeypatch.delitem(os.environ, "CPU_NUM_DEVICES", raising=False)
    runner._use_devices(place("--num_gpus", "8"))
    assert "8 devices are asked for; one process drives all chips of this host" in caplog.text
    assert "CPU_NUM_DEVICES" not in os.environ
    with pytest.raises(SpmdZeroUsageError, match="can't choose among the chips"):
        runner._use_devices(place("--include", "localhost:0"))


def test_a_program_of_its_own_takes_the_place_of_the_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *words: sys.exit(started.append(words)))
    for words, own in ([], ["--local_rank=0"]), (["--no_local_rank"], []):
        with pytest.raises(SystemExit):
            runner.main([*words, "--no_python", "env", "--x"])
        assert started.pop() == (shutil.which("env"), ["env", *own, "--x"])


def test_options_hosts_and_slots_are_those_that_deepspeed_reads(
    hostfile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("deepspeed.launcher.runner")
    known = theirs.fetch_hostfile(hostfile)
    pool = read_hostfile(hostfile)
    assert pool == dict(known)
    texts = ["", "worker-0", "worker-1:1", "worker-0:2,0@worker-1", "worker-1@worker-0:3", "c:0"]
    for include, exclude in itertools.product(texts, texts):
        try:
            expected = theirs.parse_inclusion_exclusion(known, include, exclude)
        except ValueError:
            expected = None
        try:
            found = filtered(pool, include=include, exclude=exclude)
        except SpmdZeroUsageError:
            found = None
        assert found == (None if expected is None else dict(expected)), (include, exclude)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: self)
    options = [{word for action in parser._actions for word in action.option_strings}
               for parser in (parse_args(), theirs.parse_args())]  # fmt: skip
    assert options[0] == options[1]


TWO = """
import deepspeed, sys, torch
deepspeed.init_distributed()
ones = torch.full((2,), 1.0 + deepspeed.comm.get_rank())
deepspeed.comm.all_reduce(ones)
print(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), ones.tolist(), sys.argv[1:])
"""


@pytest.mark.slow
def test_two_hosts_that_run_the_line_by_themselves_are_connected(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "train.py").write_text(TWO)
    line = [sys.executable, "-m", "spmdzero.launcher.runner", "-H", "hosts", "--no_ssh"]
    line += ["--master_port", free_port(), "--node_rank"]
    children = [
        subprocess.Popen(
            [*line, str(rank), "train.py", "--x"], cwd=tmp_path, text=True,
            env=environment(PYTHONPATH=str(ROOT), PJRT_DEVICE="CPU"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, child in enumerate(children):
        out, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
        assert out.splitlines()[-1] == f"{rank} 2 [3.0, 3.0] ['--local_rank=0', '--x']"
