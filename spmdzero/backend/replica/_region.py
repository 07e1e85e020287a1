"""The replica region: a module's forward and backward run per device, as one rank would run them.

Inputs enter as batch shards and parameters as copies. Outputs leave as batch shards, scalar
losses as their mean over replicas, buffers as their mean; a parameter's gradient goes to a sink,
still in replica space. There is no collective inside, by construction.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from spmdzero._logging import log_once
from spmdzero.backend._current import runtime
from spmdzero.backend._interrupts import let_in
from spmdzero.backend._mesh import Mesh
from spmdzero.backend._region import (
    AttentionCall,
    GradientSink,
    KeySource,
    Passage,
    Reader,
    RegionRules,
    Tracing,
    refuse_gradient_hooks,
)
from spmdzero.backend._tree import Batch, map_tensors
from spmdzero.backend.replica import _manual
from spmdzero.backend.replica._around import Around, FollowError
from spmdzero.backend.replica._boundary import enter_batch, enter_parameter, enter_whole
from spmdzero.backend.replica._buffers import changed_buffers, leave_buffers
from spmdzero.backend.replica._dispatch import RegionDispatch
from spmdzero.backend.replica._kept import kept_tensors, refuse_new
from spmdzero.backend.replica._outputs import Outputs
from spmdzero.backend.replica._random import ReplicaRandom
from spmdzero.backend.replica._reentrant import second_runs
from spmdzero.errors import ReplicaRegionError


class ReplicaRegion:
    """Calls `module` once per device, each on its own rows.

    Args:
        mesh: the devices; every axis carries the batch.
        module: its parameters and buffers live on the device, replicated.
        sink: called in backward with each trainable parameter's name and this replica's
            gradient, in replica space; several calls for one name are to be summed.
        rules: declared exceptions to the rules of entering and leaving.
        seed: how many times the global loss's gradients those inside the region, and so those
            that reach `sink`, are: 1, or the number of devices, which makes each replica
            differentiate its own loss.
        around: what the backend puts around the module.

    Attributes:
        replicas: number of each replica, `[n]` int32, sharded.
        recomputes: whether the latest forward checkpoints activations.
        read_at: where the latest pass read a value from the devices that may be another at the
            next step, None for nowhere.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        module: nn.Module,
        sink: GradientSink,
        rules: RegionRules,
        around: Around,
        seed: int = 1,
    ) -> None:
        self._mesh, self._module, self._sink = mesh, module, sink
        self._outputs = Outputs(mesh=mesh, rules=rules, seed=seed)
        self._seed, self._around = seed, around
        first = runtime.process_index() * runtime.local_device_count()
        ids = torch.arange(first, first + runtime.local_device_count(), dtype=torch.int32)
        self.replicas = mesh.place(ids, mesh.batch_spec(1))
        # The latest call's state; None when that was folded, whose backward pass brings its own.
        self._state: Mapping[str, torch.Tensor] | None = None
        # Backward passes that run in it, one inside of another.
        self._in_backward = 0
        self.disagreements: dict[str, torch.Tensor] = {}
        self.recomputes = False
        self.read_at: str | None = None

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """How the latest pass computes attention; empty where its program has no kernels."""
        return self._around.attention

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module on global tensors: `Batch` enters as shards, a plain tensor whole.

        Returns the module's output in global space.

        Raises:
            ReplicaRegionError: see `RegionDispatch`, and outputs that no rule covers.
        """
        passage = self.trace(args, kwargs, self._own())
        if torch.is_grad_enabled():
            self._state = passage.state
        self.settle(buffers=passage.buffers, flags=passage.flags)
        return passage.output

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Passage:
        """As a call, but nothing of the module is read or written."""
        replica_rows: dict[int, int] = {}
        unshared: list[Batch] = []

        def enter_input(_: str, tensor: Any) -> torch.Tensor:
            if not isinstance(tensor, Batch):
                return enter_whole(tensor, self._mesh, self._seed)
            if not tensor.shared:
                unshared.append(tensor)
                return enter_whole(tensor.tensor, self._mesh, self._seed)
            whole, dim, joined = tensor.tensor, tensor.dim, tensor.joined
            rows = whole.shape[dim] // self._mesh.size
            # A model that pairs the rows of two batches returns as many as one of them has.
            replica_rows.update({rows // joined: 1, rows: joined})
            return enter_batch(whole, dim, self._mesh, self._seed, joined=joined)

        parameters, buffers = self._enter_state(own)
        entered_args, entered_kwargs = map_tensors((args, dict(kwargs)), enter_input)
        versions = {name: buffer._version for name, buffer in buffers.items()}
        state = {**parameters, **buffers}
        entered = dict(state)
        kept = kept_tensors(self._module)
        generator, given = torch.get_rng_state(), (state, entered_args, entered_kwargs, own)
        try:
            output, dispatch = self._run(*given, loops=True)
        except FollowError as error:
            log_once(f"the forward is traced again, block by block: {error}")
            torch.set_rng_state(generator)
            output, dispatch = self._run(*given, loops=False)
        self.recomputes, self.read_at = dispatch.recomputes, dispatch.read_at
        refuse_new(kept, kept_tensors(self._module))
        changed = changed_buffers(state, buffers, versions, wrote=dispatch.wrote)
        flags: dict[str, torch.Tensor] = {}
        written = leave_buffers(changed, self._mesh, flags)
        if unshared:
            whole = self._outputs.leave_first(output)
        else:
            whole = self._outputs.leave(output, replica_rows, flags)
        return Passage(output=whole, buffers=written, flags=flags, state=entered)

    def _run(self, state: Any, args: Any, kwargs: Any, own: Tracing, *, loops: bool) -> Any:
        with self._dispatch(own.key, own.read) as dispatch:
            around = self._around.forward(
                dispatch.random, self._upload, self._enter_whole, loops=loops
            )
            with around:
                with let_in(), second_runs(lambda: self._again(state)):
                    output = functional_call(self._module, state, args, kwargs)
                output = self._around.finish(output)
        return output, dispatch

    @contextlib.contextmanager
    def _again(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Around a part of the forward that runs again, in a backward pass that may have none."""
        if self._in_backward:
            yield
            return
        with self.backward(state):
            yield

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call would return; nothing of the module is written, and no backward may come.

        Raises:
            ReplicaRegionError: as a call.
        """
        latest = self.recomputes, self.read_at
        try:
            return self.trace(args, kwargs, self._own()).output
        finally:
            self.recomputes, self.read_at = latest

    def settle(
        self, *, buffers: Mapping[str, torch.Tensor], flags: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes what a `Passage` says to the module, and remembers its flags."""
        own = dict(self._module.named_buffers()) if buffers else {}
        for name, value in buffers.items():
            self._mesh.commit(own[name], value)
        for label, flag in flags.items():
            known = self.disagreements[label] if label in self.disagreements else self._agreement()
            self.disagreements[label] = self._mesh.mark(known | flag)

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward pass is to come that runs parts of the latest forward again."""
        return self.recomputes and bool(self._state)

    def note_folded(self) -> None:
        """The latest forward was one operation: nothing of it is recomputed in backward."""
        self.recomputes, self._state = False, None

    @contextlib.contextmanager
    def backward(
        self,
        state: Mapping[str, torch.Tensor] | None = None,
        *,
        key: KeySource | None = None,
        read: Reader | None = None,
    ) -> Iterator[None]:
        """Wraps `loss.backward()`: gradient checkpointing runs the module's forward again there.

        It then finds the replicas' parameters, random numbers and checked reads of the forward.

        Args:
            state: of the `Passage` that the loss comes from, None for that of the latest call.
            key, read: as in `Tracing`, for what the user runs in backward; None for the region's.
        """
        if state is None:
            if self._state is None:
                yield
                return
            state, self._state = self._state, {}
        inside = _reparametrize_module(self._module, dict(state), tie_weights=True)
        self._in_backward += 1
        try:
            with self._dispatch(key, read) as dispatch, self._around.backward(), inside:
                yield
        finally:
            self._in_backward -= 1
        self.read_at = self.read_at or dispatch.read_at

    def _own(self) -> Tracing:
        return Tracing(
            parameters=dict(self._module.named_parameters()),
            buffers=dict(self._module.named_buffers()),
            sink=self._sink,
            key=self._make_key,
            read=self._read,
        )

    def _dispatch(self, key: KeySource | None, read: Reader | None) -> RegionDispatch:
        key = key or self._make_key
        replica = self._mesh.enter(self.replicas, self._mesh.batch_spec(1))
        return RegionDispatch(
            random=ReplicaRandom(replica, lambda value: self._enter_whole(key(value))),
            read=read or self._read,
            read_fixed=self._read_fixed,
            upload=self._upload,
            owner=self._module,
            quirks=self._around.quirks,
        )

    def _enter_state(self, own: Tracing) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        parameters = {}
        for name, parameter in own.parameters.items():
            if parameter.requires_grad and torch.is_grad_enabled():
                refuse_gradient_hooks(name, parameter)
                parameters[name] = enter_parameter(
                    parameter, name, self._mesh, self._seed, own.sink
                )
            else:
                parameters[name] = self._enter_whole(parameter.detach())
        return parameters, {name: self._enter_whole(each) for name, each in own.buffers.items()}

    def _enter_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mesh.enter(tensor, (None,) * tensor.dim())

    def _agreement(self) -> torch.Tensor:
        # It is uploaded, so that the first note has the graph of the later ones.
        return self._mesh.place(torch.zeros((), dtype=torch.int32))

    def check_agreement(self) -> None:
        """Reads whether integer outputs and buffers were the same on every replica so far.

        Raises:
            ReplicaRegionError: one was not; names it.
        """
        flags = dict(self.disagreements)
        # They are kept, at zero: the next forward then has the graph of the latest.
        self.disagreements.update({label: self._agreement() for label in flags})
        for label, flag in flags.items():
            if flag.item():
                raise ReplicaRegionError(
                    f"{label} is an integer and differs between replicas, so it has no one value. "
                    "Make it independent of the batch, or a float, whose mean is taken"
                )

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        return _manual.read_stacked(tensor, self._mesh)

    def _read_fixed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._read(tensor) if self._around.is_fixed(tensor) else None

    def _make_key(self, value: int) -> torch.Tensor:
        return self._mesh.place(torch.tensor(value, dtype=torch.int64).to(torch.int32))

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        return self._enter_whole(self._mesh.place(host.detach().contiguous()))
