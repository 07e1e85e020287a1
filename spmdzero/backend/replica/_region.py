"""The replica region: a module's forward and backward run per device, as one rank would run them.

Inputs enter as batch shards and parameters as copies. Outputs leave as batch shards, scalar
losses as their mean over replicas, buffers as their mean; a parameter's gradient goes to a sink,
still in replica space. The only collectives inside are those that the module's Python asks for.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from spmdzero._logging import log_once
from spmdzero.backend._current import arrays, current, runtime
from spmdzero.backend._interrupts import let_in
from spmdzero.backend._keys import key_of
from spmdzero.backend.forms._indices import INDICES, IndexSites, RegionIndices, first_flag
from spmdzero.backend.forms._own_rows import local_replicas
from spmdzero.backend.forms._work import Work
from spmdzero.backend.protocols._mesh import REPLICATED, Mesh, PartitionSpec
from spmdzero.backend.protocols._region import (
    AttentionCall,
    GradientSink,
    KeySource,
    Passage,
    Reader,
    Recompute,
    RegionRules,
    Tracing,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.pure import Folds
from spmdzero.backend.replica import _manual
from spmdzero.backend.replica._around import Around, FollowError, Provided
from spmdzero.backend.replica._collectives import RowCollectives
from spmdzero.backend.replica._dispatch import RegionDispatch
from spmdzero.backend.replica._entered import Entered, enter
from spmdzero.backend.replica._gathered import GatheredAtUse
from spmdzero.backend.replica._group_methods import collectives_over
from spmdzero.backend.replica._kept import KeptTensors
from spmdzero.backend.replica._outputs import Outputs
from spmdzero.backend.replica._random import ReplicaRandom
from spmdzero.backend.replica._recomputed_blocks import RecomputedBlocks
from spmdzero.backend.replica._torchs_checkpoint import second_runs, tied_checkpoints
from spmdzero.backend.replica._work_counter import WorkCounter
from spmdzero.backend.replica._written import (
    FirstWrong,
    leave_written,
    own_state,
    refuse_written,
    write_back,
    write_stamps,
)
from spmdzero.errors import ReplicaRegionError
from spmdzero.plan import Layout


class ReplicaRegion:
    """Calls `module` once per replica, each time on the replica's own rows.

    Args:
        mesh: the devices; every axis but ``sequence`` and ``tensor`` splits the batch.
        module: its parameters and buffers live on the device, replicated except those in
            `gathered`.
        sink: called in backward with each trainable parameter's name and this replica's
            gradient, in replica space; several gradients of one name have to be summed.
        rules: declared exceptions to the rules of entering and leaving.
        seed: the factor of gradients inside the region, which also reach `sink`, over those of the
            global loss: 1, or the number of devices, with which each replica differentiates its own
            loss.
        around: the contexts that the backend puts around the module.
        wrote: called with the names of parameters and buffers that a forward wrote.
        gathered: gathers parameters that are stored as shards; None where there are none.
        layouts: name -> layout, of the parameters of which a device holds only its part.

    Attributes:
        replicas: number of each replica, `[n]` int32, sharded.
        recomputes: whether the latest forward checkpoints activations.
        collects: whether its Python has asked for a rank or a collective, as its backward may.
        read_at: the line where the latest pass read a value from the devices that may change by the
            next step, None where it read none.
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
        wrote: Wrote = ignore_writes,
        gathered: GatheredAtUse | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        self._gathered, self._layouts = gathered, layouts or {}
        self._mesh, self._module, self._sink, self._wrote = mesh, module, sink, wrote
        self._outputs = Outputs(mesh=mesh, rules=rules, seed=seed)
        self._seed, self._around = seed, around
        local = local_replicas(mesh.spec)
        first = runtime.process_index() * local
        ids = torch.arange(first, first + local, dtype=torch.int32)
        self.replicas = mesh.place(ids, mesh.batch_spec(1))
        # The latest call's state; None if the call was folded: its backward brings a state of its
        # own.
        self._state: Mapping[str, torch.Tensor] | None = None
        # Number of backward passes inside the region, one inside another.
        self._in_backward = 0
        self.disagreements: dict[str, torch.Tensor] = {}
        self._sites, self._folds = IndexSites(), Folds.of_few(mesh)
        self.recomputes = self.collects = self._alone = False
        self.read_at: str | None = None

    @property
    def attention(self) -> tuple[AttentionCall, ...]:
        """The attention calls of the latest pass; empty where its program has no kernels."""
        return self._around.attention

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module on global tensors: a `Batch` enters as shards, a plain tensor whole.

        Returns the module's output in global space.

        Raises:
            ReplicaRegionError: see `RegionDispatch`; or no rule covers an output.
        """
        passage = self.trace(args, kwargs, self._own())
        if torch.is_grad_enabled():
            self._state = passage.state
        self.settle(written=passage.written, flags=passage.flags)
        return passage.output

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Passage:
        """Runs the module as a call does, but reads and writes nothing that the module holds."""
        kept, stamps = KeptTensors(self._module), write_stamps(own_state(self._module))
        generator = torch.get_rng_state()
        try:
            entered, output, dispatch = self._run(args, kwargs, own, kept, loops=True)
        except FollowError as error:
            log_once(f"the equal blocks are compiled one by one, and not as one loop: {error}")
            torch.set_rng_state(generator)
            kept.undo()
            entered, output, dispatch = self._run(args, kwargs, own, kept, loops=False)
        self.recomputes, self.read_at = dispatch.recomputes, dispatch.read_at
        kept.leave(self._mesh, self._around)
        refuse_written(stamps, own_state(self._module))
        flags: dict[str, torch.Tensor] = {}
        written = leave_written(entered.watch.written(entered.state), self._mesh, flags)
        if entered.whole:
            whole = self._outputs.leave_first(output)
        else:
            whole = self._outputs.leave(output, entered.rows, flags)
        if dispatch.outside is not None:
            # Each device keeps its own, so that it costs nothing on the wire.
            flags[INDICES] = _manual.leave_stacked(dispatch.outside, self._mesh)
        return Passage(output=whole, written=written, flags=flags, state=entered.watch.before)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        own: Tracing,
        kept: KeptTensors,
        *,
        loops: bool,
    ) -> tuple[Entered, Any, RegionDispatch]:
        entered = self._enter(args, kwargs, own)
        output, dispatch = self._call(entered, own, loops=loops)
        refusal = entered.watch.refusal(entered.state)
        if refusal is not None:
            # Run it once more, to find the line.
            kept.undo()
            again = self._enter(args, kwargs, own)
            first = FirstWrong(again.watch.refusal, self._module, again.state)
            self._call(again, own, loops=False, inside=first)
            raise ReplicaRegionError(refusal)
        return entered, output, dispatch

    def _enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Entered:
        return enter(args, kwargs, own, mesh=self._mesh, seed=self._seed, gathered=self._gathered)

    def _call(
        self,
        entered: Entered,
        own: Tracing,
        *,
        loops: bool,
        inside: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, RegionDispatch]:
        self._hand_over_attributes(entered.state)
        replicas = _reparametrize_module(self._module, entered.state, tie_weights=True)
        noted = self._dispatch(own.key, own.read, indices=RegionIndices(self._sites))
        with (
            self._gathers(),
            noted as dispatch,
            self._collectives(dispatch, alone=entered.whole),
        ):
            provided = Provided(
                random=dispatch.random,
                upload=self._upload,
                enter_whole=self._enter_whole,
                gathered=self._gathered,
            )
            with self._around.forward(provided, loops=loops):
                again = second_runs(lambda: self._again(entered.watch.before))
                within = inside or contextlib.nullcontext()
                with replicas, let_in(), again, tied_checkpoints(), within:
                    output = self._module(*entered.args, **entered.kwargs)
                output = self._around.finish(output)
        return output, dispatch

    def _hand_over_attributes(self, state: Mapping[str, torch.Tensor]) -> None:
        """Gives what stands for a parameter or buffer in the forward the attributes of its own."""
        for name, tensor in own_state(self._module).items():
            own = arrays.attributes(tensor)
            mine = {key: own[key] for key in own if not key.startswith("_spmdzero")}
            if mine and name in state:
                vars(state[name]).update(mine)

    @contextlib.contextmanager
    def _again(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Context around a part of the forward that runs again; enters the region if need be."""
        if self._in_backward:
            yield
            return
        with self.backward(state):
            yield

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of a call that writes nothing to the module and allows no backward.

        Raises:
            ReplicaRegionError: as in a call.
        """
        latest = self.recomputes, self.read_at
        try:
            return self.trace(args, kwargs, self._own()).output
        finally:
            self.recomputes, self.read_at = latest

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
        """The arithmetic of a call, see `WorkCounter`; the module and its programs stay as is.

        Raises:
            ReplicaRegionError: as in a call.
        """
        latest = self.recomputes, self.read_at, self.collects, self._alone
        kept, calls, own = KeptTensors(self._module), self._around.attention, self._own()
        try:
            entered = self._enter(args, kwargs, own)
            # What each replica has whole, each computes.
            replicas = 1 if entered.whole else self._mesh.spec.replicas
            counter = WorkCounter(replicas / self._mesh.spec.size)
            with counter.active():
                # Loops are left out, and nothing runs backwards: each operation is seen once.
                self._call(entered, own, loops=False, inside=counter)
            return counter.work
        finally:
            kept.undo()
            self._around.attention = calls
            self.recomputes, self.read_at, self.collects, self._alone = latest

    def settle(
        self, *, written: Mapping[str, torch.Tensor], flags: Mapping[str, torch.Tensor]
    ) -> None:
        """Writes the new values of a `Passage` to the module, and remembers its flags."""
        write_back(written, self._module, self._mesh, self._layouts, self._wrote)
        if flags:
            # The first flags are uploaded, so that they have the same graph as the later ones.
            known = [self.disagreements.get(label) for label in flags]
            pairs = zip(known, flags.values(), strict=True)
            known = [self._nothing(new.shape) if old is None else old for old, new in pairs]
            merged = self._folds("flags", self._merged, [*known, *flags.values()])
            self.disagreements.update(zip(flags, merged, strict=True))

    def _merged(self, flags: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The known flags, which are the first half, with those of a forward, the second."""
        half = len(flags) // 2
        merged = map(first_flag, flags[:half], flags[half:])
        return [self._mesh.mark(flag, self._spec_of(flag)) for flag in merged]

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward pass is still to come that runs parts of the latest forward again."""
        return self.recomputes and bool(self._state)

    def recompute(self, policy: Recompute) -> None:
        """Has blocks of the model run again in backward from now on, as `policy` says."""
        self._around.recomputed = RecomputedBlocks(self._module, policy)

    def note_folded(self) -> None:
        """Records that the latest forward was one operation, which backward doesn't recompute."""
        self.recomputes = self.collects = False
        self._state = None

    @contextlib.contextmanager
    def backward(
        self,
        state: Mapping[str, torch.Tensor] | None = None,
        *,
        key: KeySource | None = None,
        read: Reader | None = None,
    ) -> Iterator[None]:
        """Context around `loss.backward()`: checkpointing runs the module's forward again there.

        That run then finds the replicas' parameters, random numbers and checked reads.

        Args:
            state: of the `Passage` that the loss comes from; None for that of the latest call.
            key, read: as in `Tracing`, for code that the user runs in the backward; None for the
                region's own.
        """
        if state is None:
            if self._state is None:
                yield
                return
            state, self._state = self._state, {}
        inside = _reparametrize_module(self._module, dict(state), tie_weights=True)
        self._in_backward += 1
        try:
            around = self._around.backward()
            with (
                self._gathers(),
                self._dispatch(key, read) as dispatch,
                self._collectives(dispatch, alone=self._alone),
                around,
                inside,
                tied_checkpoints(),
            ):
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

    def _gathers(self) -> contextlib.AbstractContextManager[None]:
        return self._gathered or contextlib.nullcontext()

    def _dispatch(
        self,
        key: KeySource | None,
        read: Reader | None,
        *,
        indices: RegionIndices | None = None,
    ) -> RegionDispatch:
        key = key or self._make_key
        replica = self._mesh.enter(self.replicas, self._mesh.batch_spec(1))
        return RegionDispatch(
            random=ReplicaRandom(replica, lambda value: self._enter_whole(key(value))),
            read=read or self._read,
            is_fixed=self._around.is_fixed,
            read_fixed=self._read,
            upload=self._upload,
            owner=self._module,
            quirks=self._around.quirks,
            gathered=self._gathered,
            indices=indices,
        )

    @contextlib.contextmanager
    def _collectives(self, dispatch: RegionDispatch, *, alone: bool) -> Iterator[None]:
        self._alone = alone
        if not current().world_of_devices:
            yield
            return
        rows = RowCollectives(
            mesh=self._mesh, replica=dispatch.random.replica, line=dispatch.line, alone=alone
        )
        with collectives_over(rows):
            yield
        self.collects = rows.used

    def _enter_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mesh.enter(tensor, (None,) * tensor.dim())

    def _nothing(self, shape: Sequence[int]) -> torch.Tensor:
        # It is uploaded, so that the first disagreement has the same graph as the later ones.
        nothing = torch.zeros(torch.Size(shape), dtype=torch.int32)
        if not shape:
            return self._mesh.place(nothing)
        return self._mesh.place(nothing[: local_replicas(self._mesh.spec)], self._spec_of(nothing))

    def _spec_of(self, flag: torch.Tensor) -> PartitionSpec:
        return self._mesh.batch_spec(flag.dim()) if flag.dim() else REPLICATED

    def check_agreement(self) -> None:
        """Reads what the devices have found so far that the host has to know.

        Raises:
            ReplicaRegionError: an integer output or buffer was not the same on every replica; the
                error names it.
            OutOfRangeError: an index lay outside of what it indexes.
        """
        flags = dict(self.disagreements)
        # They stay, set to zero: the next forward then has the same graph as the latest.
        self.disagreements.update({k: self._nothing(flag.shape) for k, flag in flags.items()})
        for label, flag in flags.items():
            if label == INDICES:
                self._sites.refuse(arrays.read(self._mesh.whole(arrays.fresh(flag))))
            elif flag.item():
                raise ReplicaRegionError(
                    f"{label} is an integer and differs between replicas, so it has no one value. "
                    "Make it independent of the batch, or a float, whose mean is taken"
                )

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        return _manual.read_stacked(tensor, self._mesh)

    def _make_key(self, value: int) -> torch.Tensor:
        return self._mesh.place(key_of(value))

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        return self._enter_whole(self._mesh.place(host.detach().contiguous()))
