"""Finds the running line of the user's code, for errors and findings."""

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import typing_extensions
from torch import nn

_PYTHON = str(Path(os.__file__).parent)
# What torch calls deprecated is called through typing_extensions.
_LIBRARIES = (
    str(Path(torch.__file__).parent), str(Path(__file__).parent), typing_extensions.__file__, "<",
)  # fmt: skip


def user_line(owner: nn.Module | None = None, *, otherwise: str = "in the forward pass") -> str:
    """`file:line (in submodule "h.0.attn")` of the user's code that is running.

    Args:
        owner: the module whose submodules are named, None to name none.
        otherwise: the text in place of the line if no user's code is running.
    """
    names = {module: name for name, module in owner.named_modules()} if owner is not None else {}
    line, module = None, None
    # A list of frames would hold this very frame, and so all tensors that its callers hold.
    for frame in _frames():
        if names and module is None and (running := _self(frame)) is not None:
            module = names.get(running)
        if line is None and _is_users(frame):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    line = line or otherwise
    if module is None:
        return line
    return f"{line} (in {'submodule ' + repr(module) if module else 'the model'})"


def user_place() -> tuple[str, int] | None:
    """File and line of `user_line`, in a microsecond or two; None if no user's code runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users_file(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def called_by_library(function: str, folder: Path) -> bool:
    """Whether a function named `function` from a file below `folder` runs above the user's code."""
    for frame in _frames():
        if _is_users(frame):
            return False
        if frame.f_code.co_name == function and Path(frame.f_code.co_filename).is_relative_to(
            folder
        ):
            return True
    return False


def frames_below() -> Iterator[FrameType]:
    """Yields the frames of libraries that the user's running line has called, the latest first."""
    for frame in _frames():
        if _is_users(frame):
            return
        yield frame


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


@functools.cache
def _is_users_file(file: str) -> bool:
    pythons = file.startswith(_PYTHON) and "site-packages" not in file
    return not (pythons or file.startswith(_LIBRARIES))


def _self(frame: FrameType) -> nn.Module | None:
    # Reading f_locals keeps the locals alive as long as the frame, before Python 3.13.
    running = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
    return running if isinstance(running, nn.Module) else None
