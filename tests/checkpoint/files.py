"""Checkpoints without an engine: small states, and saves that die or fail where one wants."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats import (
    HostState,
    Retention,
    SaveOrder,
    StoredTensor,
    TrainingState,
    save_native,
)
from spmdzero.formats import open_state as open_state
from tests.support.processes import fork

# Every function of `os` by which the writer changes what is on the disk, or makes it permanent.
OPERATIONS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir", "close")


def state_of(number: int) -> TrainingState:
    """A state that differs from that of every other number in each of its tensors."""
    generator = torch.Generator().manual_seed(number)
    tensors = {
        "parameter/a": torch.randn(16, 9, generator=generator).bfloat16(),
        "master/a": torch.randn(16, 9, generator=generator),
        "exp_avg/a": torch.randn(16, 9, generator=generator),
        "buffer/count": torch.tensor(number),
    }
    return TrainingState(
        tensors={name: in_two(tensor) for name, tensor in tensors.items()},
        host=HostState(counters={"global_steps": number}, client_state={"number": number}),
        source="a test",
    )


def in_two(tensor: torch.Tensor) -> StoredTensor:
    """A tensor that is saved in two pieces, as if two devices held it."""
    whole = StoredTensor.of(tensor)
    if not tensor.dim():
        return whole
    (_, rows), *inner = whole.pieces[0]
    pieces = tuple(((start, stop), *inner) for start, stop in ((0, rows // 2), (rows // 2, rows)))
    return dataclasses.replace(whole, pieces=pieces)


def order_of(folder: Path, number: int, **more: Any) -> SaveOrder:
    """A save of `state_of(number)` as the tag ``step<number>``."""
    options: dict[str, Any] = {
        "folder": folder,
        "tag": f"step{number}",
        "nonce": f"{number:08x}",
        "latest": True,
        "retention": Retention(),
        "description": {"counters": {"global_steps": number}},
    }
    return SaveOrder(**options | more)


def save(folder: Path, number: int, **more: Any) -> None:
    """Saves `state_of(number)`."""
    save_native(state_of(number), order_of(folder, number, **more))


def number_in(folder: Path, tag: str) -> int:
    """Which state a tag holds; fails unless it is that state, in every bit of it."""
    found = open_state(folder, tag)
    found.check({name: list(tensor.pieces) for name, tensor in found.tensors.items()})
    number = found.host.client_state["number"]
    expected = state_of(number)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name].whole(), tensor.whole()), name
    return number


@contextmanager
def interrupted(before: Callable[[int, str], None]) -> Iterator[None]:
    """Calls `before(count, name)` ahead of each file operation inside, counted from 0."""
    originals = {name: getattr(os, name) for name in OPERATIONS}
    count = 0

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            before(count, name)
            count += 1
            return originals[name](*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def killed_at(point: int, act: Callable[[], None], *, torn: float | None = None) -> bool:
    """Runs `act` in a child that SIGKILL ends ahead of its `point`-th file operation.

    Args:
        point: counted from 0.
        act: what the child does.
        torn: if that operation is a write, the share of it that still reaches the file.

    Returns whether the child was killed; False when it had come to its end before.
    """
    child = fork()
    if child == 0:
        write = os.write

        def die(count: int, name: str) -> None:
            if count == point and not (name == "write" and torn is not None):
                os.kill(os.getpid(), signal.SIGKILL)

        def torn_write(handle: int, data: Any) -> int:
            nonlocal writes_at
            if writes_at == point:
                write(handle, data[: int(len(data) * (torn or 0))])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(handle, data)

        writes_at = -1

        def note(count: int, name: str) -> None:
            nonlocal writes_at
            writes_at = count if name == "write" else -1
            die(count, name)

        status = 1
        try:
            os.write = torn_write  # type: ignore[assignment]
            with interrupted(note):
                act()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)
