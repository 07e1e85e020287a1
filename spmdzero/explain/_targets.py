"""A step's programs as several compilers compile them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

from spmdzero.audit import Finding, ReadProgram
from spmdzero.backend import Work, runtime
from spmdzero.explain._aot import Compiled, CompilerMemory, compile_for_tpu
from spmdzero.explain._chips import CHIPS, Topology
from spmdzero.explain._fit import TargetMemory
from spmdzero.explain._flags import flags_on
from spmdzero.explain._moves import (
    Moves,
    ProgramLedger,
    floor_elements,
    measure_moves,
    shared_bytes,
)
from spmdzero.explain._progress import Step
from spmdzero.explain._roofline import Roofline, roofline
from spmdzero.explain._time import StepTime, step_time
from spmdzero.explain._trace import TracedProgram
from spmdzero.hlo import Matmul
from spmdzero.inspect import read_matmuls
from spmdzero.plan import Role, ShardingPlan, itemsize

# Number of simultaneous compilations; each is a process that keeps one core busy most of the time.
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Target:
    """The programs of a step, compiled for one target.

    Attributes:
        name: ``cpu:8``, ``v5e:2x4``, ...
        topology: the chips; None for this process's own compiler.
        traced: the programs before compilation.
        made: the same programs after compilation.
        sharing: axis -> its devices, of the axes along which devices share a replica's work.
    """

    name: str
    topology: Topology | None
    traced: tuple[TracedProgram, ...]
    made: tuple[Compiled, ...]
    sharing: Mapping[str, int] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether all programs were compiled; False if one needs more than a chip's memory."""
        return all(made.hlo is not None for made in self.made)

    @property
    def memory(self) -> TargetMemory:
        """The memory of the step, bytes per device."""
        return TargetMemory(
            target=self.name,
            memory=of_a_step([made.memory for made in self.made]),
            hbm_bytes=self.topology.chip.hbm_bytes if self.topology else None,
        )

    @cached_property
    def _read(self) -> tuple[tuple[TracedProgram, ReadProgram], ...]:
        return tuple(
            (traced, ReadProgram(made.hlo, outputs=traced.outputs, **self.sharing))
            for traced, made in zip(self.traced, self.made, strict=True)
            if made.hlo is not None
        )

    @property
    def programs(self) -> tuple[ProgramLedger, ...]:
        """The ledger of each program."""
        return tuple(
            ProgramLedger(kind=traced.kind, runs=traced.runs, ledger=read.ledger)
            for traced, read in self._read
        )

    def moves(self, plan: ShardingPlan) -> Moves:
        """The traffic of one step."""
        stray = tuple(collective for _, read in self._read for collective in read.stray)
        return measure_moves(
            plan, self.programs, stray=stray, target=self.name, topology=self.topology
        )

    def findings(self, *, dtypes: Mapping[str, str], communicate: str | None) -> Iterator[Finding]:
        """Faults in the programs; the arguments are those of `ReadProgram.findings`."""
        for traced, read in self._read:
            yield from read.findings(
                dtypes=dtypes,
                where=f"{traced.kind} program on {self.name}",
                communicate=communicate,
                over_slices=self.topology is not None and self.topology.slices > 1,
            )

    @cached_property
    def time(self) -> StepTime:
        """The time of one step on the target's chip, by the TPU compiler's estimate."""
        assert self.topology is not None
        programs = [
            (made.hlo, traced.runs)
            for traced, made in zip(self.traced, self.made, strict=True)
            if made.hlo is not None
        ]
        work = _of_a_step(self.traced)
        return step_time(programs, self.topology.chip, target=self.name, work=work)

    def roofline(self, *, matmul_flops: float | None, tokens: int) -> Roofline:
        """The times of one step on the target's chip, by the compiler's own counts.

        Args:
            matmul_flops: operations of matrix products of one device in one step; None counts all
                operations as such.
            tokens: number of tokens per device and step.
        """
        assert self.topology is not None
        runs = [(traced.runs, made) for traced, made in zip(self.traced, self.made, strict=True)]
        flops = sum(n * (made.flops or 0.0) for n, made in runs)
        return roofline(
            self.topology.chip,
            target=self.name,
            flops=flops,
            matmul_flops=flops if matmul_flops is None else matmul_flops,
            bytes_accessed=sum(n * (made.bytes_accessed or 0.0) for n, made in runs),
            wire_bytes=sum(p.runs * p.ledger.wire_bytes for p in self.programs),
            tokens=tokens,
            peak=self.time.peak_flops,
            shared_bytes=sum(p.runs * shared_bytes(p.ledger) for p in self.programs),
        )


def _of_a_step(programs: Sequence[TracedProgram]) -> Work | None:
    """The model's arithmetic in one step; None where it wasn't counted of all programs."""
    counted = [p.work.times(p.runs) for p in programs if p.work is not None]
    return sum(counted, Work()) if len(counted) == len(programs) else None


def compile_on(
    programs: Sequence[TracedProgram],
    topologies: Sequence[Topology],
    *,
    for_tpu: Mapping[str, Sequence[TracedProgram]],
    flags: str,
    stage: int,
    step: Step,
    sharing: Mapping[str, int],
) -> list[Target]:
    """Compiles a step for the topologies; the first target is this process's own, if compiled.

    Args:
        programs: the programs on this process's devices.
        topologies: the TPU targets.
        for_tpu: name of a topology -> the programs for it.
        flags: the name of the config's set of flags.
        stage: the ZeRO stage, for the progress.
        step: shows the progress of a compilation.
        sharing: axis -> its devices, of the axes along which devices share a replica's work.
    """
    here = f"{runtime.platform().lower()}:{runtime.device_count()}"

    def compiled(job: tuple[TracedProgram, Topology]) -> Compiled:
        program, topology = job
        with step(f"stage {stage}, {program.kind} program for {topology.name}"):
            assert program.annotated is not None
            return compile_for_tpu(program.annotated, topology, flags=flags_on(topology, flags))

    own = tuple(program.compiled for program in programs if program.compiled is not None)
    target = partial(Target, sharing=sharing)
    targets = [target(name=here, topology=None, traced=tuple(programs), made=own)] if own else []
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        jobs = [
            (program, topology) for topology in topologies for program in for_tpu[topology.name]
        ]
        made = iter(list(pool.map(compiled, jobs)))
    for topology in topologies:
        traced = tuple(for_tpu[topology.name])
        mine = tuple(next(made) for _ in traced)
        targets.append(target(name=topology.name, topology=topology, traced=traced, made=mine))
    return targets


def rooflines(plan: ShardingPlan, targets: Sequence[Target], tokens: int) -> Iterator[Roofline]:
    """The roofline of each topology, or without one of each chip by the CPU's program."""
    products = next((_products(t) for t in targets if t.topology is None), None)
    matmul_flops = None if products is None else sum(2 * p.macs for p in products)
    on_tpu = [target for target in targets if target.topology is not None]
    for target in on_tpu:
        yield target.roofline(matmul_flops=matmul_flops, tokens=tokens)
    if on_tpu or products is None or matmul_flops is None:
        return
    # Parameters and gradients cross the wire in the parameters' dtype.
    width = max((itemsize(tensor.dtype(Role.PARAMETER)) for tensor in plan), default=4)
    for chip in CHIPS.values():
        yield roofline(
            chip,
            target=chip.name,
            flops=matmul_flops,
            matmul_flops=matmul_flops,
            bytes_accessed=None,
            wire_bytes=floor_elements(plan) * width,
            tokens=tokens,
            peak=chip.peak_of(products),
        )


def _products(target: Target) -> list[Matmul]:
    """All matrix products of one device in one step."""
    return [
        product.times(traced.runs)
        for traced, made in zip(target.traced, target.made, strict=True)
        for product in read_matmuls(made.hlo or "")
    ]


def of_a_step(programs: Sequence[CompilerMemory]) -> CompilerMemory:
    """The memory of a step of several programs; the last program is the boundary's.

    Only the boundary's program has every state among its inputs, but all states take memory while a
    micro-batch runs too.
    """
    sizes = [(memory.arguments, memory.peak) for memory in programs]
    if any(arguments is None for arguments, _ in sizes):
        return CompilerMemory(arguments=None, peak=max(peak for _, peak in sizes))
    temporary = max(peak - (arguments or 0) for arguments, peak in sizes)
    arguments = programs[-1].arguments or 0
    on_host = programs[-1].host_arguments
    return CompilerMemory(
        arguments=arguments,
        peak=arguments + temporary,
        host_arguments=on_host,
        host_peak=on_host + max(each.host_peak - each.host_arguments for each in programs),
    )
