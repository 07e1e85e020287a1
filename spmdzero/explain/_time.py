"""The time of a step on a TPU, by its compiler's own estimate."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import computed_field

from spmdzero._display import Shown
from spmdzero.backend import Work
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._calibration import Calibrated, calibrated
from spmdzero.explain._chips import Chip, Topology
from spmdzero.explain._kinds import KINDS, kind_of
from spmdzero.explain._timeline import Spent, timeline
from spmdzero.hlo import Matmul, Operation, operation_of, read_matmuls, read_schedule
from spmdzero.profiling import traced_in

_DEAREST = 10
_HOST_LINKS = ("from host", "to host")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part of a step's time.

    Attributes:
        name: name of a kind of operation, or of a module: ``""`` is the model itself without its
            modules, None all operations that no module traced: the update, and most of the wire.
        seconds: seconds in one step.
        operations: number of operations that run in one step.
    """

    name: str | None
    seconds: float
    operations: int


@dataclass(frozen=True, kw_only=True)
class DearOperation:
    """Operations of the same kind and name that the same line traced, also in sibling modules.

    Attributes:
        name: name of the first operation in the program's text.
        kind: kind of the operations, see `StepTime.kinds`.
        module: the innermost module that traced them, forward or backward, ``blocks.*.up`` for all
            of ``blocks.0.up``, ``blocks.1.up``, ...; None if no module did.
        traced_as: the operation from which they were compiled, such as ``aten::mm``; "" if unknown.
        source: ``file:line`` of the user that traced them, "" if unknown.
        runs: number of their runs in one step, together.
        seconds: seconds of all these runs.
        modelled: whether the time comes from a model and not from the compiler's estimate.
    """

    name: str
    kind: str
    module: str | None
    traced_as: str
    source: str
    runs: int
    seconds: float
    modelled: bool


@dataclass(frozen=True, kw_only=True)
class StepTime(Shown):
    """The estimated time of one step on one TPU, seconds.

    It is good for comparing programs: a real chip takes longer if a kernel or the network is slower
    than its model, and for operations that wait for memory libtpu assumes about half the peak rate.

    Attributes:
        target: ``v5e:2x4``, ...
        cycles: the compiler's estimate of all operations except kernels and collectives.
        clock: the chip's cycles per second.
        compiled: the time of these cycles.
        kernels: the least time of Pallas kernels, by a model.
        wire: the least time of all transfers over ICI, by a model.
        exposed: the part of `wire` that no operation hides, for which the chip waits.
        from_host, to_host: bytes of all copies from the host's memory, and to it.
        host_rate: bytes per second of each way between the chip and its host's memory.
        host: the least time of all these copies, one after the other, by a model.
        host_exposed: the time that the chip waits for them: other operations, and copies that go
            the other way, hide the rest.
        flops: operations of all matrix products of one device in the compiled programs, kernels
            and what is computed again included.
        model_flops: operations of one device that the model asks for, whatever the programs make of
            it: a forward, and a backward without recomputation. docs/explain.md says how they are
            counted. None where they are not known.
        not_counted: why `model_flops` are not known, in words.
        peak_flops: the chip's peak operations per second, of the dtypes that `flops` multiply: that
            of bf16, or what is left of it and of int8's or fp8's where operands are such numbers.
        kinds: the step's time by kind of operation: attention's batched products and softmax, other
            products, normalisation, loss, optimizer, copies, kernels, wire (exposed), host's memory
            (exposed), other.
        modules: the step's time by the innermost module that traced it, forward or backward,
            longest first.
        dearest: the ten operations that take longest.
        products: the part of `compiled` of operations with products of matrices; None in what was
            written before this was kept.
        uncounted: number of fusions without an estimate of the compiler, such as gathers; their
            time counts as zero.
    """

    target: str
    cycles: int
    clock: float
    compiled: float
    kernels: float
    wire: float
    exposed: float
    flops: float
    peak_flops: float
    kinds: tuple[Share, ...]
    modules: tuple[Share, ...]
    dearest: tuple[DearOperation, ...]
    uncounted: int
    from_host: int = 0
    to_host: int = 0
    host_rate: float = 0.0
    host: float = 0.0
    host_exposed: float = 0.0
    model_flops: float | None = None
    not_counted: tuple[str, ...] = ()
    products: float | None = None

    @property
    def seconds(self) -> float:
        """The time of one step."""
        return self.compiled + self.kernels + self.exposed + self.host_exposed

    @property
    def hidden(self) -> float:
        """The part of the wire's time that other operations hide."""
        # Times that were summed in a different order differ in the last bit.
        return max(self.wire - self.exposed, 0.0)

    @property
    def classes(self) -> dict[str, float]:
        """The seconds of each class that calibration corrects, see `explain.CLASSES`.

        Products are of matrices, where they are no kernel; memory is what the compiler estimates
        besides, which waits for memory; wire and host are what the chip waits
        for, and hidden what it sends while it computes.
        """
        products = self.products
        if products is None:
            products = sum(k.seconds for k in self.kinds if k.name in ("attention", "matmul"))
        return {
            "products": products,
            "memory": self.compiled - products,
            "kernels": self.kernels,
            "wire": self.exposed,
            "hidden": self.hidden,
            "host": self.host_exposed,
        }

    @computed_field
    @property
    def calibrated(self) -> Calibrated | None:
        """The time on the scale of steps that were measured.

        None if none was on such chips, or the step is shorter than 10 ms.
        """
        try:
            generation = Topology.parse(self.target).chip.name
        except SpmdZeroUsageError:
            return None
        return calibrated(self.classes, generation)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the chip's peak that `model_flops` are.

        None where these are not known, see `not_counted`. Others' figures go by this name (PaLM,
        arXiv 2204.02311, appendix B).
        """
        return None if self.model_flops is None else self._share_of_peak(self.model_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: the share of the chip's peak that all `flops` are."""
        return self._share_of_peak(self.flops)

    def _share_of_peak(self, flops: float) -> float:
        return flops / (self.seconds * self.peak_flops) if self.seconds else 0.0


def step_time(
    programs: Iterable[tuple[str, int]], chip: Chip, *, target: str, work: Work | None = None
) -> StepTime:
    """The time of a step of several programs.

    Args:
        programs: optimised HLO as libtpu wrote it, and its number of runs in one step.
        chip: the figures of each device.
        target: the topology's name.
        work: the model's own arithmetic in one step; None if it isn't known.

    Raises:
        SpmdZeroUsageError: a text is not a whole HLO module.
    """
    spent: list[Spent] = []
    products: list[Matmul] = []
    for hlo, runs in programs:
        spent += timeline(read_schedule(hlo), chip, runs=runs)
        products += (p.times(runs) for p in read_matmuls(hlo, exact=True))
    parts = list(_parts(spent))
    compiled = [s for s in spent if s.operation.kernel is None]
    kernels = [s for s in spent if s.operation.kernel is not None]
    in_kernels = sum(s.runs * s.flops for s in kernels)
    flops = in_kernels + sum(2 * product.macs for product in products)
    return StepTime(
        target=target,
        cycles=sum(s.runs * (s.operation.cycles or 0) for s in compiled),
        clock=chip.clock,
        compiled=sum(s.runs * s.compute for s in compiled),
        kernels=sum(s.runs * s.compute for s in kernels),
        wire=sum(s.runs * s.transfer for s in spent if s.link == "wire"),
        exposed=sum(s.runs * s.waiting for s in spent if s.link == "wire"),
        from_host=sum(s.runs * s.operation.from_host for s in spent),
        to_host=sum(s.runs * s.operation.to_host for s in spent),
        host_rate=chip.host_rate,
        host=sum(s.runs * s.transfer for s in spent if s.link in _HOST_LINKS),
        host_exposed=sum(s.runs * s.waiting for s in spent if s.link in _HOST_LINKS),
        flops=flops,
        peak_flops=chip.peak_of(products, in_kernels=in_kernels),
        kinds=_kinds(parts),
        modules=_modules(parts),
        dearest=_dearest(parts),
        uncounted=sum(s.runs for s in spent if _is_uncounted(s)),
        model_flops=None if work is None or work.unknown else work.flops,
        not_counted=() if work is None else work.unknown,
        products=sum(s.runs * s.compute for s in compiled if s.operation.products),
    )


@dataclass(frozen=True)
class _Part:
    """The compute time or the waiting time of an operation, in all of its runs."""

    operation: Operation
    kind: str
    runs: int
    seconds: float
    modelled: bool

    @property
    def module(self) -> str | None:
        """The innermost module, from the first of the operation's names that has one."""
        return next((m for m in map(traced_in, self.operation.op_names) if m is not None), None)


def _parts(spent: Iterable[Spent]) -> Iterator[_Part]:
    for s in spent:
        if s.compute:
            modelled = s.operation.kernel is not None
            yield _Part(s.operation, kind_of(s.operation), s.runs, s.runs * s.compute, modelled)
        if s.waiting:
            kind = "host" if s.link in _HOST_LINKS else s.link
            yield _Part(s.operation, kind, s.runs, s.runs * s.waiting, True)


def _grouped(
    parts: Iterable[_Part], key: Callable[[_Part], Hashable]
) -> list[tuple[list[_Part], float, int]]:
    """Groups of parts with the same key, with their seconds and runs; longest first."""
    groups: dict[Hashable, list[_Part]] = defaultdict(list)
    for part in parts:
        groups[key(part)].append(part)
    sums = [(g, sum(p.seconds for p in g), sum(p.runs for p in g)) for g in groups.values()]
    return sorted(sums, key=lambda found: -found[1])


def _kinds(parts: Sequence[_Part]) -> tuple[Share, ...]:
    found = {
        group[0].kind: Share(name=group[0].kind, seconds=seconds, operations=runs)
        for group, seconds, runs in _grouped(parts, lambda part: part.kind)
    }
    return tuple(found.get(k, Share(name=k, seconds=0.0, operations=0)) for k in KINDS)


def _modules(parts: Sequence[_Part]) -> tuple[Share, ...]:
    return tuple(
        Share(name=group[0].module, seconds=seconds, operations=runs)
        for group, seconds, runs in _grouped(parts, lambda part: part.module)
    )


def _dearest(parts: Sequence[_Part]) -> tuple[DearOperation, ...]:
    return tuple(
        DearOperation(
            name=group[0].operation.name,
            kind=group[0].kind,
            module=siblings(group[0].module),
            traced_as=_traced_as(group[0].operation),
            source=_users(group[0].operation.source),
            runs=runs,
            seconds=seconds,
            modelled=group[0].modelled,
        )
        for group, seconds, runs in _grouped(parts, _alike)[:_DEAREST]
    )


def _alike(part: _Part) -> Hashable:
    operation = part.operation
    return part.kind, siblings(part.module), _traced_as(operation), operation.source


def siblings(module: str | None) -> str | None:
    """A module's name without the numbers in it: ``blocks.*.up`` for ``blocks.0.up``."""
    return None if module is None else re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _traced_as(operation: Operation) -> str:
    """The last part of an operation's name, ``aten::mm``; for ZeRO's operations ``zero.update``."""
    if not operation.op_names:
        return operation.opcode
    name = operation.op_names[0]
    zero = re.search(r"\bzero\.\w+", name)
    return zero[0] if zero else operation_of(name)


def _users(source: str) -> str:
    """The source, or "" if it is a line of torch, a backend or spmdzero, not of the model.

    Each operation in the replica region has such a source: the line that dispatches it.
    """
    return "" if re.search(r"(?:^|/)(?:torch|torch_xla|jax|spmdzero)/", source) else source


def _is_uncounted(spent: Spent) -> bool:
    operation = spent.operation
    free = operation.cycles is not None or operation.kernel is not None or operation.wire_bytes
    return operation.opcode == "fusion" and not free and not operation.ends
