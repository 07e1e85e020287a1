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
from typer.testing import CliRunner

from spmdzero.cli import app
from tests.support.processes import ROOT, environment, free_port

# A loaded machine imports slowly.
SECONDS = 180
TRAIN = """
import os, sys, time
import torch
import deepspeed

folder, steps, fails = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fails"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(model=model, config={
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1,
    "log_level": "info", "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
})
engine.load_checkpoint(folder)
rank, count = deepspeed.comm.get_rank(), engine.dp_world_size
rows = torch.arange(64.0).reshape(8, 8) / 100
mine = rows.chunk(deepspeed.comm.get_world_size())[rank]
for step in range(engine.global_steps, steps):
    loss = engine(mine).mean()
    engine.backward(loss)
    engine.step()
    print(f"rank {rank} of {count} devices: step {step} loss {loss.item():.6f}")
    if step == 1:
        engine.save_checkpoint(folder)
    if step == 2 and rank == 1 and fails and os.environ["SPMDZERO_RESTART"] == "0":
        print("looks for the data", flush=True)
        raise FileNotFoundError("no shard 7")
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
        # What a shell starts in the background, such as these tests, ignores it, and so does what
        # that starts. A fork of this process, with JAX's threads, could set it too, and hang.
        ["env", "--default-signal=INT", sys.executable, "-m", "spmdzero", "launch", *words],
        env=environment(**told),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def run(*words: str, **variables: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of `spmdzero launch`, run by this process."""
    told: dict[str, str | None] = {"SPMDZERO_BACKEND": "jax", "PYTHONPATH": str(ROOT), **variables}
    # An earlier test may have left this process a place among processes.
    gone = {name: None for name in os.environ if name not in environment()}
    done = CliRunner().invoke(app, ["launch", *words], env=gone | told)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """The variables with which `ssh` is the stand-in."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "SSH_LOG": str(tmp_path / "calls"), "HOME": str(tmp_path)}


LOSS = r"^{host}: rank {rank} of 8 devices: step (\d) loss (\S+)$"


def losses_of(host: str, rank: int, out: str) -> list[tuple[str, str]]:
    """What a host has printed of its steps."""
    return re.findall(LOSS.format(host=host, rank=rank), out, re.M)


@pytest.mark.slow
def test_a_script_of_deepspeeds_fails_on_one_of_two_hosts_and_is_started_again(
    tmp_path: Path,
) -> None:
    status, out, errors = run(
        "--hosts", "2", "--devices-per-host", "4", "--restarts", "1", "--elastic",
        script(tmp_path, TRAIN), str(tmp_path / "saved"), "4", "fails",
    )  # fmt: skip
    assert status == 0, errors[-3000:]
    first, second = (losses_of(f"host {rank}", rank, out) for rank in (0, 1))
    # Each prints the loss of its own rows; the first may be ended before it prints its third.
    assert [step for step, _ in (*first[:2], *first[-2:])] == ["0", "1", "2", "3"]
    assert not {loss for _, loss in first} & {loss for _, loss in second}
    # It goes on from the checkpoint after step 1, with the loss that step 2 had.
    assert [step for step, _ in second] == ["0", "1", "2", "2", "3"]
    assert second[2] == second[3]
    assert len({loss for _, loss in second}) == 4
    # Progress is said once, at each start.
    assert len(re.findall(r"] step=3, skipped=", out + errors)) == 2
    last = errors.partition("host 1 ended with status 1, and so all hosts end.")[2]
    assert "    looks for the data\n" in last
    # torch puts the rank before what Python prints of an exception.
    assert re.search(r"^    (\[rank1\]: )?FileNotFoundError: no shard 7$", last, re.M), last
    assert "SPMDZERO_RESTART=1, of at most 1); the newest checkpoint is" in last


@pytest.mark.slow
def test_the_others_sentence_is_printed_where_a_host_is_killed(tmp_path: Path) -> None:
    # In the place of what data, or the system that is out of memory, does to a host.
    killed = TRAIN.replace("raise FileNotFoundError", "os.kill(os.getpid(), 9)  #")
    status, _, errors = run(
        "--hosts", "2", "--devices-per-host", "4", script(tmp_path, killed),
        str(tmp_path / "saved"), "1000", "fails",
    )  # fmt: skip
    assert status == 137, errors[-3000:]
    said, _, last = errors.partition("host 1 ended by SIGKILL, and so all hosts end.")
    assert last, errors[-3000:]
    assert re.search(r"^host 0: spmdzero: host 1 \(.+\) is gone: .+ lost", said, re.M), said
    assert f"The newest complete checkpoint is {tmp_path}/saved/global_step2" in said
    # Gloo's frames say nothing more.
    assert "Traceback" not in said


def test_what_all_hosts_raise_alike_is_printed_once(tmp_path: Path) -> None:
    differ = TRAIN.replace("manual_seed(0)", 'manual_seed(int(os.environ["RANK"]))')
    status, out, errors = run(
        "--hosts", "2", "--devices-per-host", "1", "--restarts", "1",
        script(tmp_path, differ), str(tmp_path / "saved"), "1", "",
    )  # fmt: skip
    assert status == 1
    (line,) = re.findall(r"^.*the hosts don't agree on the model's.*$", out + errors, re.M)
    assert re.match(r"host 0: (\[rank0\]: )?\S+HostsDifferError: .+ the model's values: ", line)
    said = errors.partition(line)[2].split("\n", 1)[1]
    assert re.fullmatch(
        r"\nhost [01] ended with status 1, as all hosts do: they differ, as host 0 says above\.\n"
        r"spmdzero launch: not started again: it would fail again: HostsDifferError\n",
        said,
    ), said


# By ssh, Ctrl-C is tried always.
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all(tmp_path: Path, sent: signal.Signals) -> None:
    with launched("--hosts", "2", script(tmp_path, WAIT)) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(sent)
        assert process.wait(SECONDS) == 130
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_launcher_that_is_killed_takes_its_hosts_with_it(tmp_path: Path) -> None:
    with launched("--hosts", "1", script(tmp_path, WAIT)) as process:
        assert process.stdout is not None
        own = Path("/proc", process.stdout.readline().split()[-1])
        process.kill()
    deadline = time.monotonic() + SECONDS
    while own.exists():
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
        "--master_port", port, "--ssh_port", "2222", script(tmp_path, TRAIN),
        str(tmp_path / "saved"), "2", "", PJRT_DEVICE="CPU", **ssh,
    )  # fmt: skip
    assert status == 0, errors[-3000:]
    calls = Path(ssh["SSH_LOG"]).read_text().splitlines()
    assert len(calls) == 2
    for rank, name in enumerate(("worker-0", "worker-2")):
        assert len(losses_of(name, rank, out)) == 2
        (call,) = [call for call in calls if f" {name} " in call]
        assert call.startswith(f"-o PasswordAuthentication=no -p 2222 -- {name} export ")
        for word in (
            f"export RANK={rank};", "export WORLD_SIZE=2;", "export MASTER_ADDR=127.0.0.1;",
            f"export MASTER_PORT={port};", "export CPU_NUM_DEVICES=4;", "export MY_SETTING='a b';",
            f"export PYTHONPATH={ROOT};", f"cd {os.getcwd()};",
            "export SPMDZERO_HOSTS=worker-0,worker-2;",
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
        (("--hosts", "2", "--elastic"), "say how often, by --restarts N"),
    ],
)
def test_lines_that_can_not_be_honoured_say_why(words: tuple[str, ...], reason: str) -> None:
    status, _, errors = run(*words, "train.py")
    assert status == 2
    assert reason in errors


@pytest.mark.parametrize("hosts", [("--hosts", "2"), ("--hosts", "2", "--devices-per-host", "4")])
def test_hosts_of_the_cpu_that_torch_xla_cannot_connect_are_refused_before_they_start(
    hosts: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = {"SPMDZERO_BACKEND": "torch_xla", "PJRT_DEVICE": "CPU"}
    status, out, errors = run(*hosts, script(tmp_path, WAIT), **chosen)
    assert (status, out) == (2, "")
    assert "torch_xla's runtime of the CPU connects no processes" in errors
    assert "set SPMDZERO_BACKEND=jax for all hosts" in errors


def test_hosts_that_ssh_reaches_are_refused_alike(tmp_path: Path, ssh: dict[str, str]) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("worker-0 slots=1\nworker-1 slots=1\n")
    chosen = {"SPMDZERO_BACKEND": "torch_xla", "PJRT_DEVICE": "CPU", **ssh}
    status, _, errors = run("-H", str(hostfile), script(tmp_path, WAIT), **chosen)
    assert status == 2
    assert "set SPMDZERO_BACKEND=jax for all hosts" in errors
    assert not Path(ssh["SSH_LOG"]).exists()
