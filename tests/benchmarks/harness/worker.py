"""One process of a peer: what `harness.child` calls to train, time and watch it."""

import dataclasses
import importlib
import resource
import time
from pathlib import Path
from typing import Any

from harness.protocol import Peer, Run
from harness.workload import Workload


def measure(peer: str, options: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    """The fields of the `Run` of a module under peers/, whose class `Peer` takes the options."""
    given = Workload(**workload)
    made = importlib.import_module(f"peers.{peer}").Peer(given, **options)
    run = _trained(made, given)
    made.close()
    return dataclasses.asdict(run)


def _trained(peer: Peer, workload: Workload) -> Run:
    model = workload.build()
    start = time.perf_counter()
    peer.place(model)
    init_seconds = time.perf_counter() - start
    del model
    seconds: list[float] = []
    host: list[float] = []
    losses: list[float] = []
    programs, sent = 0, 0
    for step in range(workload.warm_up + workload.steps):
        if step == workload.warm_up:
            programs, sent = peer.programs(), _loopback_bytes()
        inputs, targets = (tensor[peer.rows] for tensor in workload.batch(step))
        start, start_host = time.perf_counter(), time.thread_time()
        loss = peer.step(inputs, targets)
        host.append(time.thread_time() - start_host)
        losses.append(peer.read(loss))
        seconds.append(time.perf_counter() - start)
    sent = _loopback_bytes() - sent
    if peer.programs() != programs:
        raise RuntimeError(f"{peer.programs() - programs} programs compiled in the timed steps")
    unread = _unread(peer, workload) if workload.unread else None
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    by_program = peer.wire_bytes(*(tensor[peer.rows] for tensor in workload.batch(0)))
    return Run(
        init_seconds=init_seconds,
        warm_up_seconds=seconds[: workload.warm_up],
        step_seconds=seconds[workload.warm_up :],
        host_seconds=host[workload.warm_up :] if peer.host_is_apart else [],
        losses=losses,
        wire_bytes=sent // workload.steps // workload.devices if by_program is None else by_program,
        peak_rss=peak_rss,
        unread_seconds=unread,
        peak_memory=peer.peak_memory(),
    )


def _unread(peer: Peer, workload: Workload) -> float:
    """Seconds of a step, of steps that are started one after another."""
    batches = [tuple(t[peer.rows] for t in workload.batch(i)) for i in range(workload.unread)]
    start = time.perf_counter()
    losses = [peer.step(*batch) for batch in batches]
    peer.read(losses[-1])
    return (time.perf_counter() - start) / workload.unread


def _loopback_bytes() -> int:
    """Bytes that all processes of this machine have sent to each other: how gloo's ranks talk."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])
