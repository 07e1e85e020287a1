"""Sources of a module's weights, tensor by tensor: safetensors files or a function."""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from spmdzero._names import listed
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._live_state import passing_buffers

Weights: TypeAlias = str | os.PathLike[str] | Callable[[str], torch.Tensor]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 5


class WeightSource(Protocol):
    """Gives each tensor of a module its value, one at a time."""

    def __call__(self, names: Collection[str]) -> torch.Tensor | None:
        """The value of the tensor with these names (tied weights have several), on the CPU.

        It is None if the tensor keeps its value.
        """
        ...


@contextlib.contextmanager
def open_weights(weights: Weights | None, module: nn.Module) -> Iterator[WeightSource]:
    """Opens the source `weights`, and checks it against all names of `module`.

    Raises:
        SpmdZeroUsageError: `weights` lacks a tensor, has one that the module doesn't have, or can't
            be read; or `weights` is None, and a tensor of the module is on the meta device.
    """
    if weights is None:
        _refuse_meta(module)
        yield lambda names: None
    elif callable(weights):
        yield _asked(weights)
    else:
        with contextlib.ExitStack() as opened:
            yield _Files(Path(weights), module, opened)


def aliases(module: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Parameter or buffer of `module` -> all of its names; tied weights have several."""
    names: dict[torch.Tensor, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    return names


def _asked(function: Callable[[str], torch.Tensor]) -> WeightSource:
    """Asks the caller's function for each tensor, by its first name."""

    def ask(names: Collection[str]) -> torch.Tensor:
        name = next(iter(names))
        value = function(name)
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            given = "a meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__
            raise SpmdZeroUsageError(
                f"weights({name!r}) returned {given}: return its value, a tensor on the CPU"
            )
        return value.detach()

    return ask


class _Files:
    """Reads each tensor from one of several safetensors files, when it is requested."""

    def __init__(self, path: Path, module: nn.Module, opened: contextlib.ExitStack) -> None:
        self._readers: dict[Path, Any] = {}
        self._opened, self._path = opened, path
        self._file_of = self._find(path)
        _compare(path, self._file_of, module)

    def __call__(self, names: Collection[str]) -> torch.Tensor | None:
        for name in names:
            if name in self._file_of:
                return self._reader(self._file_of[name]).get_tensor(name)
        return None

    def _find(self, path: Path) -> dict[str, Path]:
        if path.is_dir():
            found = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
            if not found:
                raise SpmdZeroUsageError(
                    f"weights={str(path)!r} is a folder without {_INDEX} and {_SINGLE}: "
                    "name the file itself"
                )
            path = found[0]
        if path.suffix == ".json":
            return {
                name: path.parent / file for name, file in self._index(path)["weight_map"].items()
            }
        return dict.fromkeys(self._reader(path).keys(), path)

    def _index(self, path: Path) -> dict[str, Any]:
        try:
            index = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SpmdZeroUsageError(f"weights={str(path)!r} can't be read: {error}") from error
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise SpmdZeroUsageError(
                f"weights={str(path)!r} is no index of safetensors files: it has no object "
                '"weight_map" from the names of tensors to files'
            )
        return index

    def _reader(self, path: Path) -> Any:
        if path not in self._readers:
            try:
                self._readers[path] = self._opened.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise SpmdZeroUsageError(
                    f"weights={str(self._path)!r}: {path} can't be read as safetensors: {error}"
                ) from error
        return self._readers[path]


def _compare(path: Path, found: Collection[str], module: nn.Module) -> None:
    keeps = passing_buffers(module)
    lacking = [
        names[0]
        for tensor, names in aliases(module).items()
        if not any(name in found for name in names)
        and (tensor.device.type == "meta" or not keeps.issuperset(names))
    ]
    known = {name for names in aliases(module).values() for name in names}
    strange = [name for name in found if name not in known]
    complaints = [
        *([f"it lacks {listed(lacking, most=_SHOWN)} of the model"] if lacking else []),
        *([f"the model has no {listed(strange, most=_SHOWN)}"] if strange else []),
    ]
    if not complaints:
        return
    fix = "Hand initialize a function: weights=lambda name: ..., which returns any tensor by name"
    if keeps.intersection(lacking):
        fix += ", or build buffers that no file keeps (persistent=False) on the CPU"
    raise SpmdZeroUsageError(f"weights={str(path)!r}: {'; '.join(complaints)}. {fix}")


def _refuse_meta(module: nn.Module) -> None:
    empty = [names[0] for t, names in aliases(module).items() if t.device.type == "meta"]
    if empty:
        raise SpmdZeroUsageError(
            f"{listed(empty, most=_SHOWN)} on the meta device: without values there is nothing to "
            'train. Pass initialize(..., weights="model.safetensors"), or a folder of them, or '
            "weights=lambda name: ..., which returns the initial value of one tensor"
        )
