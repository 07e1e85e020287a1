"""From the start of a process to its first step, where it compiles and where it has no need to."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

import psutil
from harness.workload import Workload

PEERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ours": ("peers.ours", {"stage": 2}),
    "by_hand": ("peers.jax_zero", {}),
}


def measure(peer: str, model: str, devices: int, folder: str) -> dict[str, float]:
    """Seconds of each part of the start of a process of a peer; `folder` keeps its programs."""
    module, options = PEERS[peer]
    if peer == "ours":
        options = {**options, "spmd": {"compile_cache": folder}}
    else:
        import jax

        jax.config.update("jax_compilation_cache_dir", folder)
        # Every program, as spmdzero keeps every one.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    workload = Workload(model=model, devices=devices, steps=1)
    made = importlib.import_module(module).Peer(workload, **options)
    now = [psutil.Process().create_time(), time.time()]
    built = workload.build()
    now.append(time.time())
    made.place(built)
    now.append(time.time())
    made.read(made.step(*workload.batch(0)))
    now.append(time.time())
    parts = ("import and devices", "model", "initialize", "first step")
    taken = {part: now[i + 1] - now[i] for i, part in enumerate(parts)}
    return taken | {"all": now[-1] - now[0]}
