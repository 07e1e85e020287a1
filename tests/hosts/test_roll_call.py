"""A host that waits for another says so, hears Ctrl-C, and names in the end who hasn't come."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.hosts.hosts import Host, by_slurm, by_torchrun
from tests.support.processes import ROOT, environment, free_port

SECONDS = 90


def said_by(host: Host, what: str) -> str:
    """Its stderr, once it has said this."""
    deadline = time.monotonic() + SECONDS
    while what not in (errors := host.said()[1]):
        assert host.process.poll() is None, errors
        assert time.monotonic() < deadline, errors
        time.sleep(0.1)
    return errors


@contextlib.contextmanager
def alone(*places: dict[str, str]) -> Iterator[list[Host]]:
    """Hosts of a job each, the first of one and the second of another, that wait for the others."""
    waiting = [
        Host(rank, ("-m", "tests.hosts.alone"), devices=1, variables=variables)
        for rank, variables in enumerate(places)
    ]
    try:
        yield waiting
    finally:
        for host in waiting:
            host.end()


def assert_ends_by_ctrl_c(host: Host) -> None:
    os.kill(host.process.pid, signal.SIGINT)
    assert host.wait(SECONDS) != 0
    assert "KeyboardInterrupt" in host.said()[1]


def test_a_host_that_waits_says_for_whom_and_ends_by_ctrl_c() -> None:
    ports = [free_port(), free_port()]
    with alone(*(by_torchrun(rank, 2, port) for rank, port in enumerate(ports))) as waiting:
        for host, port in zip(waiting, ports, strict=True):
            said_by(host, f"spmdzero: waiting for host {1 - host.rank} of 2 at 127.0.0.1:{port}: ")
            assert_ends_by_ctrl_c(host)


def test_a_host_of_a_detected_cluster_that_waits_says_so_and_ends_by_ctrl_c() -> None:
    with alone(*(by_slurm(rank, 2, free_port()) for rank in range(2))) as waiting:
        for host in waiting:
            line = (
                rf"spmdzero: host {host.rank} of 2 waits for the others at localhost:\d+, as JAX "
            )
            errors = said_by(host, "waits for the others")
            assert re.search(line + r"has found them: \d+ s of 600 s\n", errors), errors
            assert_ends_by_ctrl_c(host)


@pytest.mark.slow
def test_a_host_of_a_detected_cluster_that_waited_in_vain_says_so() -> None:
    # A process that imports spmdzero itself, which reads the minutes then: they have no parts.
    place = by_slurm(0, 2, free_port())
    told = {"SPMDZERO_BACKEND": "jax", "PJRT_DEVICE": "CPU", "DEEPSPEED_TIMEOUT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hosts.alone"],
        cwd=ROOT,
        env=environment(CPU_NUM_DEVICES="1", **told, **place),
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * SECONDS,
    )
    assert done.returncode == 1
    # What JAX's threads say of the end stands below it.
    (error,) = re.findall(r"^.*SpmdZeroRuntimeError: .*$", done.stderr, re.M)
    assert "host 0 of 2 waits for the others at localhost:" in error
    assert "and 60 s are over (DEEPSPEED_TIMEOUT counts minutes)" in error


def test_a_host_that_waited_in_vain_names_those_who_have_not_come() -> None:
    port = free_port()
    names = {"SPMDZERO_HOSTS": "worker-0,worker-1,worker-2"}
    place = by_torchrun(0, 3, port) | names
    host = Host(0, ("-m", "tests.hosts.alone", "2"), devices=1, variables=place)
    try:
        assert host.wait(SECONDS) == 1
        errors = host.said()[1]
        assert f"hosts 1 (worker-1), 2 (worker-2) of 3 didn't come at 127.0.0.1:{port}" in errors
    finally:
        host.end()
