"""Tells whether a step fits a chip, what its memory holds, and what would make it fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spmdzero.explain._chips import CHIPS, Topology, slices_of
from spmdzero.explain._fit import TargetMemory
from spmdzero.plan import Role, ShardingPlan


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change that alone would make a step fit.

    Attributes:
        what: the change, in words.
        peak: bytes per device afterwards; None if only a new compilation tells.
        by: ``"compiler"`` if the changed step was compiled; ``"estimate"`` if the plan gives the
            bytes, and the rest of the peak stays or shrinks with the rows; ``""`` if `peak` is
            None.
    """

    what: str
    peak: int | None
    by: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the config's stage fits one target, bytes per device.

    Attributes:
        target: ``cpu:8``, ``v5e:2x4``, ...
        stage: the config's ZeRO stage.
        fits: whether the peak is within the chip's memory; None on the CPU.
        peak: the largest memory in use at once, by the target's compiler.
        hbm_bytes: memory of a device; None on the CPU.
        parameters: part of the peak for parameters, by the plan.
        states: part for master weights and the optimizer's states, by the plan.
        gradients: part for the accumulator, or without one the gradient at the step, by the plan.
        rest: everything else: activations, whole gradients before they are reduced, the batch,
            buffers.
        on_host: host memory for a device's states, by the plan.
        changes: changes that would each make the step fit, if it doesn't.
    """

    target: str
    stage: int
    fits: bool | None
    peak: int
    hbm_bytes: int | None
    parameters: int
    states: int
    gradients: int
    rest: int
    on_host: int = 0
    changes: tuple[Change, ...] = ()

    @property
    def without_offloading(self) -> int | None:
        """Tells the peak without offloading, if the step would fit then too; None otherwise."""
        peak = self.peak + self.on_host
        fits = self.hbm_bytes is not None and peak <= self.hbm_bytes
        return peak if self.on_host and fits else None


def verdicts(
    plan: ShardingPlan,
    compiled: Mapping[int, Sequence[TargetMemory]],
    topologies: Sequence[Topology],
    *,
    rows: int,
) -> tuple[Verdict, ...]:
    """A verdict for each topology, or without topologies one for this process's own devices.

    Args:
        plan: the plan of the config's stage.
        compiled: stage -> its memory on each target.
        topologies: the topologies for which the step was compiled.
        rows: number of rows of a micro-batch on a device.
    """
    chips = {topology.name: topology for topology in topologies}
    own = [memory for memory in compiled[plan.stage] if memory.target in chips or not chips]
    return tuple(_verdict(plan, memory, compiled, chips.get(memory.target), rows) for memory in own)


def _verdict(
    plan: ShardingPlan,
    memory: TargetMemory,
    compiled: Mapping[int, Sequence[TargetMemory]],
    topology: Topology | None,
    rows: int,
) -> Verdict:
    peak = memory.memory.peak
    parameters, states, gradients = _by_role(plan)
    # A peak during the forward has no gradient of the step.
    gradients = max(0, min(gradients, peak - parameters - states))
    rest = max(0, peak - parameters - states - gradients)
    changes: tuple[Change, ...] = ()
    if memory.fits is False and topology is not None:
        changes = tuple(_Changes(plan, memory, compiled, topology, rows, rest).all())
    return Verdict(
        target=memory.target,
        stage=plan.stage,
        fits=memory.fits,
        peak=peak,
        hbm_bytes=memory.hbm_bytes,
        parameters=parameters,
        states=states,
        gradients=gradients,
        rest=rest,
        on_host=plan.memory().host_total,
        changes=changes,
    )


def _by_role(plan: ShardingPlan) -> tuple[int, int, int]:
    """Bytes per device of the parameters, states and gradients of a plan."""
    size = plan.memory()
    gradients = size[Role.ACCUMULATOR] or size[Role.GRADIENT]
    return size[Role.PARAMETER], size[Role.MASTER] + size[Role.MOMENT], gradients


@dataclass(frozen=True)
class _Changes:
    plan: ShardingPlan
    memory: TargetMemory
    compiled: Mapping[int, Sequence[TargetMemory]]
    topology: Topology
    rows: int
    rest: int

    def all(self) -> Iterator[Change]:
        """Yields the smallest sufficient change of each kind, the cheapest to try first."""
        found = self._stage(), self._offload(), self._recompute(), self._rows()
        for change in (*found, self._chips(), self._chip()):
            if change is not None:
                yield change

    @property
    def _room(self) -> int:
        return self.topology.chip.hbm_bytes

    def _planned(self, plan: ShardingPlan, rest: int, what: str) -> Change | None:
        peak = sum(_by_role(plan)) + rest
        return Change(what=what, peak=peak, by="estimate") if peak <= self._room else None

    def _stage(self) -> Change | None:
        for stage in range(self.plan.stage + 1, 4):
            what = f'"zero_optimization": {{"stage": {stage}}}'
            found = [m for m in self.compiled.get(stage, ()) if m.target == self.memory.target]
            if found and found[0].fits:
                return Change(what=what, peak=found[0].memory.peak, by="compiler")
            planned = self._planned(self.plan.at_stage(stage), self.rest, what)
            if not found and planned is not None:
                return planned
        return None

    def _offload(self) -> Change | None:
        if self.plan.on_host:
            return None
        what = '"offload_optimizer": {"device": "cpu"}, for the time that the copies take'
        return self._planned(self.plan.with_states_on_host(), self.rest, what)

    def _recompute(self) -> Change | None:
        """A change to recompute activations, whose share of the rest is not known."""
        if self.memory.memory.peak - self.rest >= self._room:
            return None
        what = (
            "recompute blocks in backward, if the model doesn't yet (torch.utils.checkpoint; in "
            "transformers gradient_checkpointing=True): of the rest only a part stays"
        )
        return Change(what=what, peak=None, by="")

    def _rows(self) -> Change | None:
        rows, times = self.rows, 1
        while rows % 2 == 0:
            rows, times = rows // 2, times * 2
            steps = self.plan.accumulation_steps * times
            what = (
                f"{rows} row{'s' * (rows > 1)} a device in place of {self.rows}: "
                f'"train_micro_batch_size_per_gpu": {rows}, "gradient_accumulation_steps": {steps}'
            )
            smaller = self._planned(
                self.plan.with_accumulation(steps), math.ceil(self.rest / times), what
            )
            if smaller is not None:
                return smaller
        return None

    def _chips(self) -> Change | None:
        own = self.topology
        for larger in slices_of(own.chip):
            times, over = divmod(larger.devices * own.slices, own.devices)
            if over or times < 2:
                continue
            axes = tuple(
                (name, size * times if name == "fsdp" else size)
                for name, size in self.plan.mesh.axes
            )
            count = f"{own.slices}x" if own.slices > 1 else ""
            what = (
                f"{own.slices * math.prod(larger.shape)} chips: {count}{larger.name} "
                f"({count}{larger.cloud_name})"
            )
            found = self._planned(
                self.plan.on_mesh(replace(self.plan.mesh, axes=axes)), self.rest, what
            )
            if found is not None:
                return found
        return None

    def _chip(self) -> Change | None:
        peak = self.memory.memory.peak
        enough = [chip for chip in CHIPS.values() if chip.hbm_bytes >= peak]
        if not enough:
            return None
        # Among equal chips it takes the newest, which comes last.
        chip = min(reversed(enough), key=lambda chip: chip.hbm_bytes)
        same = [t.name for t in slices_of(chip) if t.devices == self.plan.mesh.size]
        where = f", {same[0]}" if same else ""
        has = f"{chip.hbm_bytes / 2**30:.0f} GiB a {'core' if chip.devices > 1 else 'chip'}"
        return Change(what=f"another chip: {chip.name} with {has}{where}", peak=peak, by="estimate")
