"""A thread that uploads batches, beside one that computes and reads."""

import sys
import threading

import torch

from spmdzero.backend import Mesh, runtime
from spmdzero.backend.jax.lazy._dispatch import value_of

DEVICE = torch.device("xla", 0)


def test_a_thread_that_uploads_disturbs_no_read(mesh: Mesh) -> None:
    kept = [torch.zeros(2, device=DEVICE) for _ in range(500)]
    runtime.sync()
    ended, failed = threading.Event(), []

    def upload() -> None:
        try:
            while not ended.is_set():
                torch.zeros(2).to(DEVICE)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=upload)
    before = sys.getswitchinterval()
    # Threads take turns more often than a read lasts.
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(150):
            assert (torch.ones(2, device=DEVICE) + 1).sum().item() == 4
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not failed
    assert len(kept) == 500


def test_names_around_operations_are_a_threads_own(mesh: Mesh) -> None:
    failed: list[object] = []

    def compute() -> None:
        for _ in range(200):
            with torch.no_grad():
                made = torch.ones(2, device=DEVICE) * 2
            scope = value_of(made).node.scope  # type: ignore[union-attr]
            if scope != ("aten__mul",):
                failed.append(scope)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=compute) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
