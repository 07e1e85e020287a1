"""Loops in programs of torch_xla: see `spmdzero.backend.scan.Loops`."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.scan import Loops
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._private.loops import loop
from spmdzero.backend.torch_xla._quirks import TorchXlaQuirks


def _run(
    function: FoldedFunction, tensors: Sequence[torch.Tensor], **form: Any
) -> list[torch.Tensor]:
    return _private.call(_computation(function.proto, **form), tensors)


@functools.lru_cache(maxsize=64)
def _computation(proto: bytes, **form: Any) -> Any:
    # Return the same object each time: the compiler recognises a program by it.
    return loop(_private.computation(proto), **form)


LOOPS = Loops(run=_run, quirks=TorchXlaQuirks(), inside=contextlib.nullcontext)
