"""One traced micro-batch, followed from its inputs to the program that it becomes."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from spmdzero.backend.torch_xla import (
    PendingProgram,
    ProgramLostError,
    Uploads,
    are_pending,
    buffer_handles,
    buffer_ids,
    count_pending,
    counters,
    record_uploads,
    set_pending_value,
    set_value,
    tensor_id,
)
from spmdzero.engine._capture_places import Place, state_places
from spmdzero.engine._capture_random import GeneratorWatch
from spmdzero.engine._capture_watch import ModuleWatch
from spmdzero.engine._record import NotCapturableError, Record, forms_of, refuse_strangers
from spmdzero.state._training import Training


class Recording:
    """Follows the trace of one micro-batch.

    Args:
        training: whose.
        inputs: the placed inputs of its forward.
        watch: what must not change meanwhile.

    Attributes:
        outcome: the record, or why there is none; None before `start`.
    """

    def __init__(
        self, training: Training, inputs: Sequence[torch.Tensor], watch: ModuleWatch
    ) -> None:
        self._training, self._watch = training, watch
        found = [(place, place.tensor) for place in state_places(training)]
        self._state = [(place, tensor) for place, tensor in found if tensor is not None]
        tensors = [tensor for _, tensor in self._state]
        self._forms, self._ids = forms_of(tensors), [tensor_id(tensor) for tensor in tensors]
        self._state_buffers = buffer_handles(tensors)
        self._input_buffers = buffer_handles(inputs)
        self._uploads = Uploads()
        self._generators = GeneratorWatch()
        self._reads = counters.host_reads()
        self.outcome: Record | NotCapturableError | None = None

    @contextlib.contextmanager
    def uploads(self) -> Iterator[None]:
        """Around the trace: notes what it uploads."""
        with record_uploads() as self._uploads:
            yield

    def start(self) -> None:
        """Takes down what is pending and starts it, unless there is a reason; sets `outcome`."""
        try:
            self._refuse_changes()
            self.outcome = self._record()
        except NotCapturableError as reason:
            self.outcome = reason
        except ProgramLostError:
            # It is still pending, and `sync` compiles it.
            self.outcome = NotCapturableError("torch_xla keeps no program until it is started")

    def _refuse_changes(self) -> None:
        if counters.host_reads() - self._reads > self._uploads.fixed_reads:
            region = self._training.region
            at = f" at {region.read_at}" if region is not None and region.read_at else ""
            raise NotCapturableError(
                f"the forward reads a value from the devices{at}, by which Python may choose its "
                "way"
            )
        if change := self._watch.change():
            raise NotCapturableError(f"the forward changes the module: {change}")

    def _record(self) -> Record:
        keys = self._generators.places_of([int(u.host) for u in self._uploads if u.role == "key"])
        hosts = self._hosts(len(set(keys)))
        outputs = self._outputs()
        roots = [tensor for _, tensor, _ in outputs]
        roots.append(self._training.losses[-1])
        if count_pending(self._training.device) > len({id(root) for root in roots}):
            # It would be computed later, from buffers that the program has overwritten.
            raise NotCapturableError("a value of the step is kept outside of the engine")
        written = self._written(roots)
        pending = PendingProgram(
            roots, donated={self._state[i][1]: self._state_buffers[i] for i in written}
        )
        used = {found.handle: found.tensor for found in pending.inputs}
        read = [i for i, handle in enumerate(self._state_buffers) if handle in used]
        sources = self._sources([self._state_buffers[i] for i in read], hosts, keys)
        others = [found for found in pending.inputs if not found.is_seed]
        refuse_strangers(others, self._uploads, known=sources)
        program = pending.compile(
            [sources.get(found.handle) for found in pending.inputs],
            sources=len(read) + len(self._input_buffers) + sum(count for _, count in hosts),
        )
        values = pending.run()
        for i in set(read) - written:
            # From now on known to torch_xla as the other tensor.
            set_value(self._state[i][1], used[self._state_buffers[i]])
        for root, value in zip(roots, values, strict=True):
            set_pending_value(root, value)
        return Record(
            program=program,
            places=tuple(self._state[i][0] for i in read),
            forms=[self._forms[i] for i in read],
            hosts=hosts,
            outputs=tuple(place for place, _, _ in outputs),
            rebound=tuple(is_new for _, _, is_new in outputs),
            summed=self._training.gradients.waiting_names,
        )

    def _written(self, roots: Sequence[torch.Tensor]) -> set[int]:
        """Indices of the state over which the pending program of `roots` writes."""
        pending = {id(root) for root in roots}
        return {
            i
            for i, (_, tensor) in enumerate(self._state)
            if id(tensor) in pending and buffer_ids(tensor)[1] == self._ids[i]
        }

    def _hosts(self, keys: int) -> tuple[tuple[str, int], ...]:
        counts: dict[str, int] = {}
        for upload in self._uploads:
            if upload.role != "constant":
                counts[upload.role] = counts.get(upload.role, 0) + 1
        return tuple((role, keys if role == "key" else n) for role, n in counts.items())

    def _outputs(self) -> list[tuple[Place, torch.Tensor, bool]]:
        """Places that the pending program writes, with their tensors, and whether those are new."""
        before = {place.name: tensor for place, tensor in self._state}
        places = [(place, place.tensor) for place in state_places(self._training)]
        present = [(place, tensor) for place, tensor in places if tensor is not None]
        pending = are_pending([tensor for _, tensor in present])
        written = []
        for (place, tensor), is_pending in zip(present, pending, strict=True):
            is_new = before.get(place.name) is not tensor
            if is_pending:
                written.append((place, tensor, is_new))
            elif is_new:
                raise NotCapturableError(f"{place.name} was replaced by a tensor made elsewhere")
        return written

    def _sources(
        self, state: Sequence[int], hosts: Sequence[tuple[str, int]], keys: Sequence[int]
    ) -> dict[int, int]:
        """Buffer -> its place among the sources of the program."""
        buffers = [*state, *self._input_buffers]
        places = {handle: place for place, handle in enumerate(buffers)}
        if len(set(state)) + len(set(self._input_buffers)) > len(places) or len(set(state)) < len(
            state
        ):
            raise NotCapturableError(
                "two tensors of the state, or an input and one, share a buffer"
            )
        following: dict[str, Iterator[int]] = {}
        end = len(buffers)
        for role, count in hosts:
            following[role] = iter(
                [end + key for key in keys] if role == "key" else range(end, end + count)
            )
            end += count
        for upload in self._uploads:
            if upload.role != "constant":
                places[upload.handle] = next(following[upload.role])
        return places
