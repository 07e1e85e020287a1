"""The forward in global space: every operation sees the whole batch, which GSPMD splits."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from spmdzero._user_line import user_line
from spmdzero.backend._current import arrays, current, runtime
from spmdzero.backend._interrupts import let_in
from spmdzero.backend._uploads import same_on_hosts
from spmdzero.backend.forms._tree import Batch, map_tensors
from spmdzero.backend.forms._work import Work
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import (
    AttentionCall,
    KeySource,
    Passage,
    Tracing,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.protocols._region import Reader as ReadsBy
from spmdzero.backend.replica._around import Around
from spmdzero.backend.replica._collectives import RowCollectives
from spmdzero.backend.replica._group_methods import collectives_over
from spmdzero.backend.replica._readers import Reader, reads_by
from spmdzero.backend.replica._work_counter import WorkCounter
from spmdzero.backend.replica._written import StateWatch, own_state, write_back
from spmdzero.errors import ReplicaRegionError

# GSPMD's propagation gathers the whole batch around these (measured on torch_xla 2.9, CPU).
_LEAKING = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.TransformerEncoderLayer,
)


class _KeepSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, mesh: Mesh) -> torch.Tensor:
        ctx.mesh, ctx.spec = mesh, mesh.batch_spec(tensor.dim(), dim)
        return mesh.mark(arrays.fresh(tensor), ctx.spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        return ctx.mesh.mark(arrays.fresh(grad), ctx.spec), None, None


class GlobalForward:
    """Calls `module` on the whole batch, and annotates inputs and outputs of leaking modules.

    Args:
        mesh: the devices; every axis splits the batch.
        module: its parameters live on the device, replicated.
        around: the contexts that the backend puts around the module.
        wrote: as in `ReplicaRegion`.

    Attributes:
        read_at: as in `ReplicaRegion`; always None, because such reads are not recorded here.
    """

    read_at: str | None = None

    def __init__(
        self,
        *,
        mesh: Mesh,
        module: nn.Module,
        around: Around,
        wrote: Wrote = ignore_writes,
    ) -> None:
        self._mesh, self._module, self._around, self._wrote = mesh, module, around, wrote
        self._rows: set[tuple[int, int]] = set()

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """Is empty, unlike that of `ReplicaRegion`, because GSPMD couldn't split a kernel."""
        return self._around.attention

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module on global tensors, `Batch` or plain, and returns its output."""
        # The forward writes buffers in place, but masters have to follow written parameters.
        parameters: dict[str, torch.Tensor] = dict(self._module.named_parameters())
        watch = StateWatch(parameters, parameters=parameters)
        output = self._call(self._module, args, kwargs)
        changed = _kept(watch, now := dict(self._module.named_parameters()))
        for name in changed:
            # Otherwise it would take over the sharding of the value that was written.
            self._mesh.whole(now[name])
        if changed:
            self._wrote(changed)
        return output

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Passage:
        """Runs the module as a call does, but reads and writes nothing that the module holds.

        Gradients reach the sink in global space. Random draws use no key, but the devices' own
        generator.

        Raises:
            ReplicaRegionError: the forward writes the module's own state; the write is undone.
        """
        state = {**own.parameters, **own.buffers}
        watch = StateWatch(state, parameters=own.parameters)
        for name, parameter in own.parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: own.sink(name, grad))

        def module(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._module, state, args, kwargs)

        with self._own_left_alone(), reads_by(Reader(values=own.read, line=user_line)):
            output = self._call(module, args, kwargs)
        _kept(watch, state)
        return Passage(output=output, written=watch.written(state), flags={}, state={})

    def settle(
        self, *, written: Mapping[str, torch.Tensor], flags: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes the new values of a `Passage`, which has no flags, to the module."""
        write_back(written, self._module, self._mesh, {}, self._wrote)

    def note_folded(self) -> None:
        """Does nothing: no backward of a global forward needs its latest call."""

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        """The arithmetic of a call, see `WorkCounter`; the module stays as it is."""
        state = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in own_state(self._module).items()
        }
        calls, drawn = self._around.attention, runtime.generator_state()
        counter = WorkCounter(1 / self._mesh.spec.size)

        def module(*args: Any, **kwargs: Any) -> Any:
            with counter:
                return functional_call(self._module, state, args, kwargs)

        try:
            with counter.active():
                self._call(module, args, kwargs)
            return counter.work
        finally:
            self._around.attention = calls
            runtime.seed(drawn)

    @contextlib.contextmanager
    def backward(
        self, state: Mapping[str, torch.Tensor], *, key: KeySource, read: ReadsBy | None
    ) -> Iterator[None]:
        """Context for the backward of the output of `trace`."""
        with contextlib.ExitStack() as reads:
            if read is not None:
                reads.enter_context(reads_by(Reader(values=read, line=user_line)))
            yield

    @contextlib.contextmanager
    def _own_left_alone(self) -> Iterator[None]:
        """Context that undoes writes into the module's own state, and then raises."""
        own = own_state(self._module)
        before = {name: tensor.detach().clone() for name, tensor in own.items()}
        values = arrays.value_ids(list(own.values()))
        try:
            yield
        finally:
            pairs = zip(own, values, arrays.value_ids(list(own.values())), strict=True)
            written = [name for name, was, value in pairs if was != value]
            for name in written:
                arrays.set_value(own[name].detach(), before[name])
        if written:
            raise ReplicaRegionError(
                f"the forward writes {written[0]!r} by a reference that was kept from before, such "
                f"as in a list of parameters: reach it as self.{written[0]}"
            )

    def _call(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._rows = set()

        def unwrap(_: str, tensor: Any) -> torch.Tensor:
            if not isinstance(tensor, Batch):
                return tensor
            self._rows.add((tensor.dim, tensor.tensor.shape[tensor.dim]))
            return tensor.tensor

        args, kwargs = map_tensors((args, dict(kwargs)), unwrap)
        with contextlib.ExitStack() as hooks:
            for part in self._module.modules():
                if isinstance(part, _LEAKING):
                    before = part.register_forward_pre_hook(lambda _, args: self._keep_split(args))
                    after = part.register_forward_hook(lambda _, args, out: self._keep_split(out))
                    hooks.callback(before.remove)
                    hooks.callback(after.remove)
            hooks.enter_context(self._around.global_forward())
            hooks.enter_context(same_on_hosts())
            if current().world_of_devices:
                # One program sees all rows, and is a world of its own.
                rows = RowCollectives(mesh=self._mesh, replica=None, line=user_line, whole=True)
                hooks.enter_context(collectives_over(rows))
            with let_in():
                return module(*args, **kwargs)

    def _keep_split(self, tree: Any) -> Any:
        return map_tensors(tree, lambda _, tensor: self._annotate(tensor))

    def _annotate(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, rows in self._rows:
            if tensor.is_floating_point() and tensor.dim() > dim and tensor.shape[dim] == rows:
                return _KeepSplit.apply(tensor, dim, self._mesh)  # type: ignore[return-value]
        return tensor


def _kept(watch: StateWatch, now: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the parameters that the forward wrote.

    Raises:
        ReplicaRegionError: a written value can't be kept.
    """
    if (refusal := watch.refusal(now)) is not None:
        raise ReplicaRegionError(refusal)
    return watch.changed(now)
