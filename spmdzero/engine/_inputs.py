"""Which of a module's inputs are batches, and their way to the devices."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.xla import Batch, DeviceMesh, RegionRules, Replicated, map_tensors, runtime
from spmdzero.xla.mesh import fresh


class InputPlacer:
    """Uploads the inputs of one call: batches as shards, everything else to every device.

    Args:
        mesh: the devices.
        module: whose forward names the positional inputs.
        rules: which dim of an input is its batch.
        micro_batch: rows that each device works on, `train_micro_batch_size_per_gpu`.
    """

    def __init__(
        self, *, mesh: DeviceMesh, module: nn.Module, rules: RegionRules, micro_batch: int
    ) -> None:
        self._mesh, self._rules, self.micro_batch = mesh, rules, micro_batch
        self.latest: tuple[tuple[str, tuple[int, ...], str], ...] = ()
        self.short_rows: int | None = None  # the loader's last micro-batch of an epoch, see there
        parameters = inspect.signature(module.forward).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        strangers = set(rules.input_batch_dims) - {p.name for p in parameters}
        if strangers and not takes_any:
            raise SpmdZeroConfigError(
                key="spmd.batch_dim",
                value=dict(rules.input_batch_dims),
                reason=f"forward has no input named {', '.join(sorted(strangers))}",
                fix=f"Its inputs are: {', '.join(p.name for p in parameters)}.",
            )
        self._positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as global tensors, wrapped in `Batch` where they are one.

        Raises:
            SpmdZeroUsageError: in training, no input has `micro_batch x local devices` rows; in
                evaluation, the first tensor's rows can't be divided over the devices; an input is
                on another device than the CPU and ours.
        """
        named = {self._name(i): value for i, value in enumerate(args)} | dict(kwargs)
        found: list[tuple[str, tuple[int, ...], int]] = []

        def look(path: str, tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > self.batch_dim(path):
                found.append((path, tuple(tensor.shape), _host_rows(tensor, self.batch_dim(path))))
            return tensor

        map_tensors(named, look)
        expected = self._expected_rows(found, training=training)

        seen: list[tuple[str, tuple[int, ...], str]] = []

        def put(path: str, tensor: Any) -> Any:
            whole = tensor.tensor if isinstance(tensor, Replicated) else tensor
            _refuse_elsewhere(path, whole)
            seen.append((path, tuple(whole.shape), str(whole.dtype).removeprefix("torch.")))
            if isinstance(tensor, Replicated):
                return self._upload(tensor.tensor, None)
            dim = self.batch_dim(path)
            if tensor.dim() <= dim or _host_rows(tensor, dim) != expected:
                return self._upload(tensor, None)
            return Batch(self._upload(tensor, dim), dim)

        placed = map_tensors(named, put)
        self.latest = tuple(seen)
        positional = tuple(placed.pop(self._name(i)) for i in range(len(args)))
        return positional, placed

    def cut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The `count` micro-batches of a batch that holds the rows of all of them, in order.

        Raises:
            SpmdZeroUsageError: no input has `count x micro_batch x local devices` rows.
        """
        rows = self.micro_batch * runtime.local_device_count()
        named = {self._name(i): value for i, value in enumerate(args)} | dict(kwargs)
        shapes: dict[str, list[int]] = {}

        def part(path: str, tensor: Any, start: int) -> Any:
            dim = self.batch_dim(path)
            if isinstance(tensor, Replicated) or tensor.dim() <= dim:
                return tensor
            shapes[path] = list(tensor.shape)
            return tensor.narrow(dim, start, rows) if tensor.shape[dim] == count * rows else tensor

        for index in range(count):
            start = index * rows
            cut = map_tensors(named, lambda path, tensor, start=start: part(path, tensor, start))
            if all(count * rows != shape[self.batch_dim(p)] for p, shape in shapes.items()):
                raise SpmdZeroUsageError(
                    f"train_batch(batch) takes the rows of a whole step, {count * rows} = "
                    f"gradient_accumulation_steps ({count}) x train_micro_batch_size_per_gpu "
                    f"({self.micro_batch}) x {rows // self.micro_batch} local devices; got "
                    f"{shapes or 'no tensor with rows'}. An iterator yields micro-batches"
                )
            yield tuple(cut.pop(self._name(i)) for i in range(len(args))), cut

    def _name(self, index: int) -> str:
        return self._positional[index] if index < len(self._positional) else f"*{index}"

    def batch_dim(self, path: str) -> int:
        """The dim of the batch of the input at `path`."""
        return self._rules.input_batch_dims.get(path.split(".")[0], self._rules.batch_dim)

    def _expected_rows(
        self, found: list[tuple[str, tuple[int, ...], int]], *, training: bool
    ) -> int:
        devices = runtime.local_device_count()
        full = self.micro_batch * devices
        if not found or any(rows == full for _, _, rows in found):
            return full
        if self.short_rows is not None and found[0][2] == self.short_rows:
            return self.short_rows
        path, shape, rows = found[0]
        if training:
            raise SpmdZeroUsageError(
                f"input {path!r} of shape {list(shape)} has {rows} rows, a micro-batch has {full} "
                f"= train_micro_batch_size_per_gpu ({self.micro_batch}) x {devices} local devices. "
                "Hand the engine all rows of this host's devices at once"
            )
        if rows % devices:
            raise SpmdZeroUsageError(
                f"input {path!r} of shape {list(shape)} has {rows} rows, which {devices} local "
                "devices can't share equally. Pad the batch, or drop its last rows"
            )
        return rows

    def _upload(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        if tensor.device.type != "cpu":
            # A number's buffer may be that of a number in the program, a view has none yet.
            return fresh(tensor) if not tensor.dim() or tensor._is_view() else tensor
        spec = (None,) * tensor.dim() if dim is None else self._mesh.batch_spec(tensor.dim(), dim)
        return self._mesh.place(tensor, spec, role="batch")


def _host_rows(tensor: torch.Tensor, dim: int) -> int:
    """Rows of this host: a CPU tensor holds only them, a tensor on the devices those of all."""
    rows = tensor.shape[dim]
    return rows if tensor.device.type == "cpu" else rows // runtime.process_count()


def to_half(tensor: Any) -> Any:
    """The input in fp16 if it is floating, for `"fp16": {"auto_cast": true}`."""
    if isinstance(tensor, Replicated):
        return Replicated(to_half(tensor.tensor))
    return tensor.half() if tensor.is_floating_point() else tensor


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
