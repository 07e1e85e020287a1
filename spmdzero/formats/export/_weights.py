"""The weights of a training state, chosen and cast for use without an optimizer."""

import dataclasses
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import StoredTensor, TrainingState


def mapped(tensor: StoredTensor) -> torch.Tensor:
    """The whole `tensor`, `[*shape]` on the CPU, in a nameless file in `tempfile.gettempdir()`.

    The system keeps as much of it in memory as there is room for; the file lives as long as the
    tensor.

    Raises:
        OSError: that folder has no space, or can't be written.
    """
    whole = tensor.whole()
    if not tensor.size:
        return whole
    try:
        with tempfile.TemporaryFile() as file:
            # Reserve the space: writing a page without space on the disk would end the process.
            os.posix_fallocate(file.fileno(), 0, tensor.size)
            memory = mmap.mmap(file.fileno(), tensor.size)
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        raise
    held = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return held.copy_(whole)


_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_called(name: str) -> torch.dtype:
    """The dtype for a name such as ``"bf16"``.

    Raises:
        SpmdZeroUsageError: the name is unknown.
    """
    if name not in _DTYPES:
        raise SpmdZeroUsageError(f"dtype {name!r}: write one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The contents of a module's state dict, which are read tensor by tensor.

    Attributes:
        tensors: state dict key -> tensor; tied ones once.
        tied: further key of a tied parameter -> the key that has it.
    """

    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]

    @classmethod
    def of(
        cls,
        state: TrainingState,
        *,
        dtype: torch.dtype | None = None,
        exclude: frozenset[str] = frozenset(),
    ) -> "Weights":
        """The parameters and buffers of `state`.

        Args:
            state: the training state.
            dtype: of floating-point tensors; fp32 takes a parameter from its master weights, which
                have more digits. None leaves every tensor in the dtype in which it trains.
            exclude: names of parameters to leave out.
        """
        chosen: dict[str, StoredTensor] = {}
        for key, tensor in state.tensors.items():
            role, _, name = key.partition("/")
            if role not in ("parameter", "buffer") or name in exclude:
                continue
            if dtype == torch.float32:
                tensor = state.tensors.get(f"master/{name}", tensor)
            chosen[name] = tensor if dtype is None else tensor.as_dtype(dtype)
        return cls(tensors=chosen, tied=state.host.tied).only(chosen)

    def only(self, names: Iterable[str]) -> "Weights":
        """The weights with these names, and the keys tied to them."""
        chosen = {name: self.tensors[name] for name in names}
        tied = {alias: name for alias, name in self.tied.items() if name in chosen}
        return Weights(tensors=chosen, tied=tied)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state dict, with tied parameters as one tensor under each of their keys.

        Only one tensor is read into memory at a time; all are in files in the system's temporary
        folder (`tempfile.gettempdir()`), which live as long as the tensors.

        Raises:
            OSError: that folder has no space.
        """
        whole = {name: mapped(tensor) for name, tensor in self.tensors.items()}
        return whole | {alias: whole[name] for alias, name in self.tied.items()}


def frozen_names(state: TrainingState) -> frozenset[str]:
    """Names of the parameters that no optimizer of `state` trains; empty if it has none."""
    names = {key.partition("/")[2] for key in state.tensors if key.startswith("parameter/")}
    groups = state.host.param_groups
    if groups is None:
        return frozenset()
    return frozenset(names - {name for group in groups for name in group["params"]})
