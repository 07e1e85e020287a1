"""`spmdzero launch`: processes that stand for hosts, and hosts by ssh, started and ended as one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment, free_port

# A loaded machine imports slowly.
SECONDS = 180
TRAIN = """
import argparse, sys
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1, "log_level": "info",
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
})
rank, count = deepspeed.comm.get_rank(), engine.dp_world_size
rows = torch.arange(count * 8.0).reshape(count, 8) / 100
mine = rows.chunk(deepspeed.comm.get_world_size())[rank]
for step in range(args.steps):
    loss = engine(mine).mean()
    engine.backward(loss)
    engine.step()
    print(f"rank {rank} of {count} devices: step {step} loss {loss.item():.6f}")
"""
FAIL = """
import os, sys, time
print("begun", flush=True)
if os.environ["RANK"] == "1":
    print("looks for the data", flush=True)
    raise FileNotFoundError("no shard 7")
time.sleep(1000)
"""
WAIT = """
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(1000)
"""
# In the place of ssh: notes what it is called with, and runs the line here.
SSH = """#!/bin/sh
for word; do line="$word"; done
printf '%s\\n' "$*" >> "$SSH_LOG"
exec sh -c "$line"
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@contextlib.contextmanager
def launched(*words: str, **variables: str) -> Iterator[subprocess.Popen]:
    told = {"SPMDZERO_BACKEND": "jax", "PYTHONPATH": str(ROOT), **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "spmdzero", "launch", *words],
        env=environment(**told),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def run(*words: str, **variables: str) -> tuple[int, str, str]:
    with launched(*words, **variables) as process:
        out, errors = process.communicate(timeout=SECONDS)
    return process.returncode, out, errors


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """The variables with which `ssh` is the stand-in."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "SSH_LOG": str(tmp_path / "calls"), "HOME": str(tmp_path)}


def test_a_script_of_deepspeeds_trains_on_two_hosts_of_this_machine(tmp_path: Path) -> None:
    status, out, errors = run(
        "--hosts", "2", "--devices-per-host", "4", script(tmp_path, TRAIN), "--steps", "3"
    )
    assert status == 0, errors[-3000:]
    said = re.findall(r"^host (\d): rank \1 of 8 devices: step (\d) loss (\S+)$", out, re.M)
    losses = [{step: loss for host, step, loss in said if host == rank} for rank in "01"]
    assert losses[0] == losses[1]
    assert losses[0].keys() == {"0", "1", "2"}
    # Progress is said once.
    assert len(re.findall(r"step=2", out + errors)) == 1


def test_a_failing_host_ends_the_others_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    status, out, errors = run("--hosts", "3", script(tmp_path, FAIL))
    assert status == 1
    assert out.count(": begun") == 3
    last = errors.partition("host 1 ended with status 1, and so all hosts end.")[2]
    assert "    looks for the data\n" in last
    assert "    FileNotFoundError: no shard 7\n" in last


@pytest.mark.parametrize(
    "sent",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_one_signal_ends_all(tmp_path: Path, sent: signal.Signals) -> None:
    with launched("--hosts", "2", script(tmp_path, WAIT)) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(sent)
        assert process.wait(SECONDS) == 130
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_launcher_that_is_killed_takes_its_hosts_with_it(tmp_path: Path) -> None:
    with launched("--hosts", "2", script(tmp_path, WAIT)) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.kill()
    deadline = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_hosts_of_a_hostfile_are_started_by_ssh_as_deepspeed_starts_them(
    tmp_path: Path, ssh: dict[str, str]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("worker-0 slots=4\nworker-1 slots=4\nworker-2 slots=4\n")
    (tmp_path / ".deepspeed_env").write_text("MY_SETTING=a b\n")
    port = free_port()
    status, out, errors = run(
        "--hostfile", str(hostfile), "--exclude", "worker-1", "--master_addr", "127.0.0.1",
        "--master_port", port, "--ssh_port", "2222", script(tmp_path, TRAIN), "--steps", "2",
        PJRT_DEVICE="CPU", **ssh,
    )  # fmt: skip
    assert status == 0, errors[-3000:]
    calls = Path(ssh["SSH_LOG"]).read_text().splitlines()
    assert len(calls) == 2
    for rank, name in enumerate(("worker-0", "worker-2")):
        assert re.search(rf"^{name}: rank {rank} of 8 devices: step 1 loss", out, re.M)
        (call,) = [call for call in calls if f" {name} " in call]
        assert call.startswith(f"-o PasswordAuthentication=no -p 2222 {name} export ")
        for word in (
            f"export RANK={rank};", "export WORLD_SIZE=2;", "export MASTER_ADDR=127.0.0.1;",
            f"export MASTER_PORT={port};", "export CPU_NUM_DEVICES=4;", "export MY_SETTING='a b';",
            f"export PYTHONPATH={ROOT};", f"cd {os.getcwd()};",
        ):  # fmt: skip
            assert word in call


def test_ctrl_c_ends_what_ssh_started(tmp_path: Path, ssh: dict[str, str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("worker-0 slots=1\nworker-1 slots=1\n")
    with launched("-H", str(hostfile), script(tmp_path, WAIT), **ssh) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "name the hosts"),
        (("--hosts", "2", "--hostfile", "x"), "leave one of them out"),
        (("--hostfile", "/nowhere"), "there is no such file"),
        (("--devices-per-host", "4"), "counts virtual devices of --hosts N"),
    ],
)
def test_lines_that_can_not_be_honoured_say_why(words: tuple[str, ...], reason: str) -> None:
    status, _, errors = run(*words, "train.py")
    assert status == 2
    assert reason in errors
