"""A host that waits for another says so, hears Ctrl-C, and names in the end who hasn't come."""

import os
import signal
import time

from tests.hosts.hosts import Host, by_torchrun
from tests.support.processes import free_port

SECONDS = 90


def said_by(host: Host, what: str) -> str:
    """Its stderr, once it has said this."""
    deadline = time.monotonic() + SECONDS
    while what not in (errors := host.said()[1]):
        assert host.process.poll() is None, errors
        assert time.monotonic() < deadline, errors
        time.sleep(0.1)
    return errors


def test_a_host_that_waits_says_for_whom_and_ends_by_ctrl_c() -> None:
    ports = [free_port(), free_port()]
    # Hosts of two jobs, each of which waits for the one that isn't there.
    waiting = [
        Host(rank, ("-m", "tests.hosts.alone"), devices=1, variables=by_torchrun(rank, 2, port))
        for rank, port in enumerate(ports)
    ]
    try:
        for host, port in zip(waiting, ports, strict=True):
            said_by(host, f"spmdzero: waiting for host {1 - host.rank} of 2 at 127.0.0.1:{port}: ")
            os.kill(host.process.pid, signal.SIGINT)
            assert host.wait(SECONDS) != 0
            assert "KeyboardInterrupt" in host.said()[1]
    finally:
        for host in waiting:
            host.end()


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
