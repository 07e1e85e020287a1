"""Finds the batches among a module's inputs, and uploads all inputs to the devices."""

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero.backend import (
    Across,
    Batch,
    Mesh,
    RegionRules,
    Replicated,
    arrays,
    map_tensors,
    runtime,
    to_all_rows,
)
from spmdzero.backend.hosts import processes
from spmdzero.backend.hosts.agreement import require_agreement
from spmdzero.data._batch_rows import Batches, BatchRows, Rows
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

logger = logging.getLogger("spmdzero")
_SAME_ROWS = (
    "Each host hands over train_micro_batch_size_per_gpu x its local devices rows, of the same "
    "shape on all hosts"
)


class InputPlacer:
    """Uploads the inputs of one call: batches as shards, all others to every device whole.

    Args:
        mesh: the devices.
        module: the module whose forward names the positional inputs.
        rules: says which dim of an input is its batch dim.
        micro_batch: rows that each replica works on, `train_micro_batch_size_per_gpu`.

    Attributes:
        rules: as given.
        rows: tells which inputs are batches.
        positional: names of the inputs that a call may give by place.
        latest: path, shape and dtype of each input of the latest call.
    """

    def __init__(
        self, *, mesh: Mesh, module: nn.Module, rules: RegionRules, micro_batch: int
    ) -> None:
        self._mesh, self.rules, self.rows = mesh, rules, BatchRows(micro_batch, mesh.spec)
        self._compared = False
        self.latest: tuple[tuple[str, tuple[int, ...], str], ...] = ()
        parameters = inspect.signature(module.forward).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = set(rules.input_batch_dims) - {p.name for p in parameters}
        if unknown and not takes_any:
            raise SpmdZeroConfigError(
                key="spmd.batch_dim",
                value=dict(rules.input_batch_dims),
                reason=f"forward has no input named {', '.join(sorted(unknown))}",
                fix=f"Its inputs are: {', '.join(p.name for p in parameters)}.",
            )
        self.positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as global tensors; batches are wrapped in `Batch`.

        An input that comes as a `Batch` is one whatever its size. If it isn't shared, no batch is.

        Raises:
            HostsDifferError: in the first training batch the hosts' inputs have different shapes.
            SpmdZeroUsageError: see `BatchRows`; or an input is neither on the CPU nor on the
                engine's devices.
        """
        named = {self._name(i): value for i, value in enumerate(args)} | dict(kwargs)
        if training and not self._compared:
            self._compared = True
            require_agreement("the first batch", _forms(named), fix=_SAME_ROWS)
        batches = self._batches(named, training=training)
        seen: list[tuple[str, tuple[int, ...], str]] = []

        def put(path: str, tensor: Any) -> Any:
            whole = tensor if isinstance(tensor, torch.Tensor) else tensor.tensor
            _refuse_elsewhere(path, whole)
            _say_gradient_is_lost(path, whole)
            seen.append((path, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")))
            if isinstance(tensor, Replicated):
                return self._upload(tensor.tensor, None)
            if path not in batches.paths and not isinstance(tensor, Batch):
                return self._upload(tensor, None)
            dim = tensor.dim if isinstance(tensor, Batch) else self.batch_dim(path)
            joined = 1 if isinstance(tensor, Batch) else batches.joined
            whole = self._upload(whole, dim if batches.shared else None)
            return Batch(whole, dim, batches.shared, joined)

        placed = map_tensors(named, put)
        self.latest = tuple(seen)
        shown = ", ".join(f"{path} {list(shape)}" for path, shape, _ in seen)
        processes.note_joint(f"{'training' if training else 'evaluation'} on {shown}")
        positional = tuple(placed.pop(self._name(i)) for i in range(len(args)))
        return positional, placed

    @property
    def across(self) -> Across | None:
        """See `Mesh`."""
        return self._mesh.across

    def shares(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> bool:
        """Whether such a call gives each device its own rows; True if no input is a batch.

        Raises:
            SpmdZeroUsageError: see `BatchRows`.
        """
        named = {self._name(i): value for i, value in enumerate(args)} | dict(kwargs)
        return self._batches(named, training=training).shared

    def _batches(self, named: Mapping[str, Any], *, training: bool) -> Batches:
        found: list[Rows] = []
        shared = True

        def look(path: str, tensor: Any) -> Any:
            nonlocal shared
            dim = self.batch_dim(path)
            if isinstance(tensor, Batch):
                shared = shared and tensor.shared
            elif isinstance(tensor, torch.Tensor) and tensor.dim() > dim:
                rows = self._host_rows(tensor, dim)
                found.append(Rows(path=path, shape=tuple(tensor.shape), count=rows))
            return tensor

        map_tensors(named, look)
        batches = self.rows.batches(found, training=training)
        # What belongs to the rows goes where they go.
        return batches if shared else dataclasses.replace(batches, shared=False)

    def cut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Splits a batch with the rows of `count` micro-batches into these, in order.

        Raises:
            SpmdZeroUsageError: no input has `count x micro_batch x local devices` rows.
        """
        if count == 1:
            yield args, dict(kwargs)
            return
        rows = self.rows.whole
        named = {self._name(i): value for i, value in enumerate(args)} | dict(kwargs)
        shapes: dict[str, list[int]] = {}

        def part(path: str, tensor: Any, start: int) -> Any:
            dim = self.batch_dim(path)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= dim:
                return tensor
            shapes[path] = list(tensor.shape)
            return tensor.narrow(dim, start, rows) if tensor.shape[dim] == count * rows else tensor

        for index in range(count):
            start = index * rows
            cut = map_tensors(named, lambda path, tensor, start=start: part(path, tensor, start))
            if all(count * rows != shape[self.batch_dim(p)] for p, shape in shapes.items()):
                raise SpmdZeroUsageError(
                    f"train_batch(batch) takes the rows of a whole step, {count * rows} = "
                    f"gradient_accumulation_steps ({count}) x {self.rows.named}; "
                    f"got {shapes or 'no tensor with rows'}. DataLoader(drop_last=True) leaves a "
                    "short last batch out; an iterator yields micro-batches"
                )
            yield tuple(cut.pop(self._name(i)) for i in range(len(args))), cut

    def _name(self, index: int) -> str:
        return self.positional[index] if index < len(self.positional) else f"*{index}"

    def batch_dim(self, path: str) -> int:
        """The batch dim of the input at `path`."""
        return self.rules.input_batch_dims.get(path.split(".")[0], self.rules.batch_dim)

    def _host_rows(self, tensor: torch.Tensor, dim: int) -> int:
        """Number of rows of this host."""
        rows = tensor.shape[dim]
        # If no tensor on the devices is a host's own, each has the rows of all hosts.
        is_own = tensor.device.type == "cpu" or self._mesh.across is not None
        return rows if is_own else rows // runtime.process_count()

    def _upload(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        across = self._mesh.across
        if across is not None and arrays.is_mine(tensor):
            if dim is not None:
                return to_all_rows(tensor, dim, across)
            if across.is_own(tensor):
                # Treat it as an input on the CPU.
                tensor = arrays.read(tensor)
        if tensor.device.type != "cpu":
            # A number may share its buffer with a number in the program; a view has no buffer yet.
            return arrays.fresh(tensor) if not tensor.dim() or tensor._is_view() else tensor
        spec = (None,) * tensor.dim() if dim is None else self._mesh.batch_spec(tensor.dim(), dim)
        return self._mesh.place(tensor, spec, waits=True)


def _forms(named: Mapping[str, Any]) -> dict[str, str]:
    forms: dict[str, str] = {}

    def look(path: str, tensor: Any) -> Any:
        plain = tensor if isinstance(tensor, torch.Tensor) else tensor.tensor
        forms[f"input {path!r}"] = f"{list(plain.shape)} {str(plain.dtype).removeprefix('torch.')}"
        return tensor

    map_tensors(named, look)
    return forms


def to_half(tensor: Any) -> Any:
    """The input in fp16 if it is floating, for `"fp16": {"auto_cast": true}`."""
    if isinstance(tensor, Replicated):
        return Replicated(to_half(tensor.tensor))
    if isinstance(tensor, Batch):
        return dataclasses.replace(tensor, tensor=to_half(tensor.tensor))
    return tensor.half() if tensor.is_floating_point() else tensor


def _say_gradient_is_lost(path: str, tensor: torch.Tensor) -> None:
    lost = tensor.requires_grad and tensor.device.type == "cpu" and torch.is_grad_enabled()
    if lost and is_new(f"gradient of {path}"):
        logger.warning(
            "input %r is on the CPU and requires a gradient, which its copy on the devices gets in "
            "its place. Move it before, x = x.to(engine.device).requires_grad_(), or detach it",
            path,
        )


def _refuse_elsewhere(path: str, tensor: torch.Tensor) -> None:
    kind = tensor.device.type
    if kind in ("cpu", runtime.device().type):
        return
    reason = "where it has no values" if kind == "meta" else "not a device of this engine"
    raise SpmdZeroUsageError(
        f"input {path!r} of shape {list(tensor.shape)} is on {tensor.device}, {reason}. Hand the "
        f"engine tensors on the CPU or on {runtime.device()}; a batch on the meta device is enough "
        "for spmdzero.explain(model, config, batch)"
    )
