"""Watches every operation of the replica region.

It makes random draws differ, checks values that Python reads, and refuses what would otherwise
abort the process inside XLA.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero._dispatch_mode import DispatchMode
from spmdzero._user_line import user_line
from spmdzero.backend._current import arrays, runtime
from spmdzero.backend._interrupts import held
from spmdzero.backend.forms._indices import (
    IndexRange,
    RegionIndices,
    indexed_by,
    noting,
)
from spmdzero.backend.replica import _shapes_of_data
from spmdzero.backend.replica._around import Quirks
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._random import (
    IN_PLACE,
    KNOWN_DRAWS,
    REPLACEMENTS,
    ReplicaRandom,
    has_generator,
)
from spmdzero.backend.replica._readers import Reader, common_value, reads_are_global, reads_by
from spmdzero.backend.replica._shapes_of_data import remedy_of_transformers
from spmdzero.errors import ReplicaRegionError

_aten = torch.ops.aten
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default}
_PUTS = {_aten.index_put.default, _aten.index_put_.default}


# A backward pass inside another one enters a region twice; only the inner mode works.
_entered: list["RegionDispatch"] = []


class RegionDispatch(DispatchMode):
    """A dispatch mode for the traced forward, and for the recomputation in its backward.

    Args:
        random: the replicas' random numbers.
        read: maps `[*shape]` in replica space to all replicas' values, `[n, *shape]` on the CPU.
        upload: maps a CPU tensor made inside the region to every replica's copy.
        owner: the module whose forward runs, to name submodules in errors.
        quirks: differences between the backend's operations and torch's.
        is_fixed: whether a value is known not to change by the next step.
        read_fixed: reads such a value, in the place of `read`.
        gathered: gathers parameters that are stored as shards; None where there are none.
        indices: takes note of indices; None where nobody asks for them.

    Attributes:
        random: as given.
        recomputes: whether hooks are set on the tensors that autograd saves, as activation
            checkpointing does.
        read_at: the line where Python first read a value that is not fixed, None if it did not.
    """

    def __init__(
        self,
        *,
        random: ReplicaRandom,
        read: Callable[[torch.Tensor], torch.Tensor],
        upload: Callable[[torch.Tensor], torch.Tensor],
        owner: nn.Module,
        quirks: Quirks,
        is_fixed: Callable[[torch.Tensor], bool] = lambda _: False,
        read_fixed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        gathered: GatheredAtUse | None = None,
        indices: RegionIndices | None = None,
    ) -> None:
        super().__init__()
        self._indices = indices
        self._quirks, self._gathered = quirks, gathered
        self.random, self._upload, self._owner = random, upload, owner
        self._read, self._is_fixed, self._read_fixed = read, is_fixed, read_fixed or read
        self.recomputes = False
        self.read_at: str | None = None

    def __enter__(self) -> "RegionDispatch":
        _entered.append(self)
        noting.append(self._note_index)
        reader = Reader(values=self._values, line=self.line, is_fixed=self._is_fixed)
        self._reads = reads_by(reader)
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._reads.__exit__(None, None, None)
        noting.pop()
        _entered.pop()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers an operation of the innermost region."""
        makes = not _takes_mine(args)
        if _entered[-1] is not self or (makes and not _names_devices(kwargs)):
            return func(*args, **kwargs)
        if any(map(_answers, args)):
            # A backward pass in the region goes through what a client made of the outputs, too.
            return func(*args, **kwargs)
        with held():
            made = self._run(func, args, kwargs)
            return self._quirks.made(made) if makes else made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Check at each operation: which of them save tensors is not known here.
        self.recomputes = self.recomputes or _saved_tensors_are_hooked()
        if func is _aten._local_scalar_dense.default:
            return self._agreed(args[0]).item()
        if func is _aten.equal.default:
            return self._equal(*args)
        if func is _aten._to_copy.default:
            return self._copy(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and has_generator(args, kwargs):
            raise self._error(
                f"{func} is given a torch.Generator, which can't drive several replicas. Leave the "
                "generator out and seed with torch.manual_seed, or draw before the forward and "
                "hand the numbers in as an input"
            )
        if func in IN_PLACE:
            return args[0].copy_(self._draw(IN_PLACE[func], args, kwargs))
        if func in REPLACEMENTS:
            return self._draw(func, args, kwargs)
        if func in _PUTS and _is_masked_fill(*args):
            filled = self._masked_fill(func, *args[:3])
            return args[0].copy_(filled) if func is _aten.index_put_.default else filled
        if _shapes_of_data.has_one(func, args):
            return self._with_a_shared_shape(func, args, kwargs)
        self._refuse_what_aborts(func, args)
        if self._indices is not None:
            for index, allowed in indexed_by(func._opname, args):
                self._note_index(index, allowed)
        if func in _BATCH_NORMS:
            return self._quirks.batch_norm(func, args, kwargs)
        try:
            return self._called(func, args, kwargs)
        except ReplicaRegionError:
            raise
        except RuntimeError as error:
            # A backend's own error begins with the line, and may name the operation.
            said = str(error).removeprefix(f"{user_line()}: ")
            named = said if said.startswith(f"{func} ") else f"{func} failed: {said}"
            raise self._error(named) from error

    @property
    def outside(self) -> torch.Tensor | None:
        """The flag of the forward's indices, see `IndexSites`; None if there were none."""
        return None if self._indices is None else self._indices.flag

    def _note_index(self, index: torch.Tensor, allowed: IndexRange) -> None:
        if self._indices is not None and arrays.is_mine(index):
            self._indices.note(index, allowed, self.line)

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.device != other.device:
            raise self._error(
                f"torch.equal of a tensor on {one.device} and one on {other.device}. Move one "
                "of them: tensor.to(device)"
            )
        if one.shape != other.shape:
            return False
        return bool(self._agreed((one == other).all()).item())

    def _masked_fill(
        self, func: Any, target: torch.Tensor, indices: Any, value: torch.Tensor
    ) -> torch.Tensor:
        before, mask = len(indices) - 1, indices[-1]
        end = before + mask.dim()
        if mask.shape != target.shape[before:end]:
            raise self._error(
                f"{func}: the mask of shape {list(mask.shape)} does not match the dims from "
                f"{before} on of a tensor of shape {list(target.shape)}"
            )
        # Broadcasting adds the dims before the mask's.
        shape = mask.shape + (1,) * (target.dim() - end)
        return torch.where(mask.reshape(shape), value.reshape(()).to(target.dtype), target)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return REPLACEMENTS[func](self.random, *args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise self._error(f"{func}: {error}") from error

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, target = args[0], kwargs.get("device")
        if target is not None and torch.device(target).type == "cpu" and arrays.is_mine(source):
            return func(self._agreed(source), **kwargs)
        if source.device.type == "cpu":
            dtype = kwargs.get("dtype") or source.dtype
            return self._upload(source.to(dtype))
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._gathered is None:
            return func(*args, **kwargs)
        return self._gathered.run(func, args, kwargs)

    def _agreed(self, tensor: torch.Tensor) -> torch.Tensor:
        return common_value(self._values(tensor), self.line)

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        with reads_are_global():
            if self._is_fixed(tensor):
                return self._read_fixed(tensor)
            self.read_at = self.read_at or self.line()
            return self._read(tensor)

    def _with_a_shared_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes an operation whose shape depends on data, if all replicas have that shape."""
        try:
            static = _shapes_of_data.made_static(
                func, args, kwargs, read=self._agreed, upload=self._upload
            )
        except ReplicaRegionError as error:
            told = _shapes_of_data.named(func, args)
            raise self._error(f"{told}{remedy_of_transformers()}. {error}") from error
        if not isinstance(static, _shapes_of_data.Indexing):
            return static
        return self._run(static.func, static.args, kwargs)

    def _refuse_what_aborts(self, func: Any, args: tuple[Any, ...]) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._error(
                f"{func} draws random numbers, and spmdzero does not know how to make them "
                f"differ between replicas. Use {KNOWN_DRAWS}"
            )
        unsupported = self._quirks.unsupported(func, args)
        if unsupported is not None:
            raise self._error(unsupported)

    def line(self) -> str:
        """Names the user's line and module."""
        return user_line(self._owner)

    def _error(self, message: str) -> ReplicaRegionError:
        return ReplicaRegionError(f"{self.line()}: {message}")


def _is_masked_fill(
    target: torch.Tensor, indices: Any, value: torch.Tensor, accumulate: bool = False
) -> bool:
    """Whether this is `target[..., mask] = one value`, in which no shape depends on data."""
    return (
        indices[-1] is not None
        and indices[-1].dtype == torch.bool
        and all(index is None for index in indices[:-1])
        and value.numel() == 1
        and not accumulate
    )


def _names_devices(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == runtime.device().type


def _takes_mine(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arrays.is_mine(arg):
                return True
        elif isinstance(arg, list | tuple) and any(
            isinstance(item, torch.Tensor) and arrays.is_mine(item) for item in arg
        ):
            return True
    return False


def _answers(arg: Any) -> bool:
    """Whether `arg` is on the CPU for torch, stands for a tensor elsewhere, and answers itself."""
    return (
        isinstance(arg, torch.Tensor)
        and type(arg).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and arg.device.type == "cpu"
        and not arrays.is_mine(arg)
    )


def _saved_tensors_are_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
