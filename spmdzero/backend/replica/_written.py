"""Parameters and buffers that a forward wrote, in whatever way, found by their values."""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from spmdzero._user_line import user_line
from spmdzero.backend._current import arrays, programs
from spmdzero.backend.protocols._mesh import REPLICATED, Mesh
from spmdzero.backend.protocols._region import Wrote
from spmdzero.backend.replica import _manual
from spmdzero.errors import ReplicaRegionError
from spmdzero.plan import Layout

Named = Mapping[str, torch.Tensor]


class StateWatch:
    """The values of a module's state before its forward.

    Values are compared by their ids: a version counter sees neither `.data` nor a batch norm.

    Args:
        state: tensors by name, before the forward.
        parameters: names of those that are parameters.

    Attributes:
        before: that state.
    """

    def __init__(self, state: Named, *, parameters: Collection[str]) -> None:
        self.before, self._parameters = dict(state), parameters
        self._values = arrays.value_ids(list(state.values()))
        # The same tensor may have another shape or dtype later, by `.data`.
        self._forms = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        self._nodes = {name: state[name].grad_fn for name in parameters}

    def changed(self, now: Named) -> list[str]:
        """Names of the tensors that the forward has replaced in `now`, or written."""
        values = arrays.value_ids([now[name] for name in self.before])
        before = zip(self.before.items(), self._values, values, strict=True)
        return [n for (n, old), was, value in before if now[n] is not old or was != value]

    def written(self, now: Named) -> dict[str, torch.Tensor]:
        """The values of `changed`, without a gradient, in the dtypes that they had."""
        return {n: now[n].detach().to(self._forms[n][1]) for n in self.changed(now)}

    def refusal(self, now: Named) -> str | None:
        """The reason why a value that the forward wrote can't be kept, None where all can."""
        reasons = (self._wrong(name, now[name]) for name in self.changed(now))
        return next((reason for reason in reasons if reason is not None), None)

    def _wrong(self, name: str, after: torch.Tensor) -> str | None:
        shape, dtype = self._forms[name]
        kind = "parameter" if name in self._parameters else "buffer"
        if after.shape != shape:
            return (
                f"forward gives the {kind} {name!r} the shape {list(after.shape)}. It had "
                f"{list(shape)}, and a compiled step keeps that: write a value of its shape"
            )
        if not torch.can_cast(after.dtype, dtype):
            return (
                f"forward writes {after.dtype} into the {kind} {name!r}, which is {dtype}. "
                f"Convert the value first, or make the {kind} one of {after.dtype}"
            )
        if kind == "buffer":
            return None
        if after is not self.before[name]:
            return (
                f"forward puts another tensor in the place of the parameter {name!r}, which the "
                f"optimizer would not know. Write into it: self.{name}.data.copy_(value)"
            )
        if after.grad_fn is not self._nodes[name]:
            return (
                f"forward writes the parameter {name!r} in place while autograd records it, which "
                "torch refuses of a leaf that requires a gradient. Write it under torch.no_grad()"
            )
        return None


class FirstWrong(TorchFunctionMode):
    """Raises ReplicaRegionError at the line of the user's code that makes `check` find a reason.

    Args:
        check: returns why the module's state, by name, can't be kept; None where it can.
        module: the module whose forward runs.
        names: of its state.
    """

    def __init__(
        self, check: Callable[[Named], str | None], module: nn.Module, names: Collection[str]
    ) -> None:
        super().__init__()
        self._check, self._module, self._names = check, module, names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        reason = self._check({name: _attribute(self._module, name) for name in self._names})
        if reason is not None:
            raise ReplicaRegionError(f"{user_line(self._module)}: {reason}")
        return made


def _attribute(module: nn.Module, name: str) -> torch.Tensor:
    return functools.reduce(getattr, name.split("."), module)  # type: ignore[return-value]


def own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def write_back(
    written: Named, module: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], wrote: Wrote
) -> None:
    """Writes the new values of a `Passage` to the module.

    Args:
        written: name -> value.
        module: whose parameters and buffers they are.
        mesh: where they live.
        layouts: of those of which a device holds only its part; the others are whole.
        wrote: is called with the names, if there are any.
    """
    if not written:
        return
    own = own_state(module)
    with torch.no_grad():
        for name, value in written.items():
            rest = layouts.get(name)
            mesh.commit(own[name], value, rest.spec if rest else REPLICATED)
    wrote(written.keys())


def leave_written(
    written: Named, mesh: Mesh, flags: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Global values of state that is in replica space, one collective for each dtype.

    Floats become their mean over replicas, integers the value that all replicas have. `flags`
    receives, by label, whether replicas differ in an integer.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in written.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    result: dict[str, torch.Tensor] = {}
    for dtype, names in by_dtype.items():
        with programs.scope(f"zero.buffer/{names[0] if len(names) == 1 else len(names)}"):
            flat = torch.cat([written[name].reshape(-1) for name in names])
            stacked = _manual.leave_stacked(
                flat.to(torch.int32) if dtype == torch.bool else flat, mesh
            )
            if dtype.is_floating_point or dtype.is_complex:
                # In fp32 the mean of equal bf16 values is that value, by which a master recognises
                # state that the forward left alone.
                stacked = stacked.float() if dtype.itemsize == 2 else stacked
                whole = mesh.whole(stacked.mean(0))
            else:
                whole = mesh.whole(stacked.amax(0))
                label = f"a parameter or buffer among {names}"
                note_disagreement(flags, label, whole, stacked.amin(0))
        parts = whole.to(dtype).split([written[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            result[name] = part.reshape(written[name].shape)
    return result


def note_disagreement(
    flags: dict[str, torch.Tensor], label: str, highest: torch.Tensor, lowest: torch.Tensor
) -> None:
    """Sets a flag, 0-dim int32: whether the replicas' highest and lowest values differ."""
    flags[label] = (highest != lowest).any().to(torch.int32)


def write_stamps(state: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    """The write stamp of each tensor."""
    return {name: arrays.write_stamp(tensor) for name, tensor in state.items()}


def refuse_written(before: Mapping[str, Hashable], state: Mapping[str, torch.Tensor]) -> None:
    """Raises ReplicaRegionError if a forward wrote the module's own state, not a replica's copy."""
    for name, stamp in write_stamps(state).items():
        if before.get(name, stamp) != stamp:
            raise ReplicaRegionError(
                f"forward writes {name!r} by a reference that was kept from before, such as in a "
                "list of parameters. Each replica has a copy, which only the module knows: reach "
                f"it as self.{name}"
            )
