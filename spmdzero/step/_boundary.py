"""The end of a step as a pure function: norm, clipping, update, gather, counters."""

import dataclasses
import functools
import math
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from spmdzero.backend import (
    Mesh,
    current,
    host_memory,
    programs,
)
from spmdzero.backend.pure import Folds
from spmdzero.optim import UpdateRule
from spmdzero.plan import Layout
from spmdzero.step._gradient_path import GradientPath
from spmdzero.step._numbers import numbers_of_groups
from spmdzero.step._update import GroupUpdate, Member


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScales:
    """The loss scale of one step on the devices, as data, so that a change needs no new program.

    Attributes:
        now: the factor in this step's gradients, 0-dim fp32.
        if_applied: the scale after the step if the step is not skipped, 0-dim fp32.
    """

    now: torch.Tensor
    if_applied: torch.Tensor


def unscale(
    scaled: torch.Tensor, *, clip: float, scales: LossScales | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global norm without the loss scale, and the factor for gradients, or None.

    The formulas are DeepSpeed's (runtime/zero/stage_1_and_2.py, `step` and
    `unscale_and_clip_grads`): the norm is infinity if it is not finite, including NaN.

    Args:
        scaled: the norm of the scaled gradients, 0-dim fp32.
        clip: the largest norm, 0 for no clipping.
        scales: fp16's loss scales, None otherwise.
    """
    norm = torch.where(torch.isfinite(scaled), scaled, torch.full_like(scaled, math.inf))
    if scales is None:
        return norm, _clip_coefficient(scaled, clip) if clip > 0 else None
    coefficient = 1.0 / scales.if_applied
    if clip > 0:
        coefficient = coefficient * _clip_coefficient(scaled / scales.if_applied, clip)
    return norm / scales.now, coefficient


def _clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """DeepSpeed's clip factor, 0-dim fp32: ``1 / max(1, (norm + 1e-6) / max_norm)``.

    A NaN `norm` gives a NaN factor, so that NaN gradients stay visible.
    """
    return 1.0 / torch.clamp((norm + 1e-6) * (1.0 / max_norm), min=1.0)


# Elements of one device's shards whose states leave the host together: 96 MiB of AdamW's in fp32.
_ON_DEVICE = 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberGroup:
    """A param group for the boundary.

    Attributes:
        rule: the group's update rule.
        members: the group's trained parameters.
        numbers: names of the group's numbers.
    """

    rule: UpdateRule
    members: tuple[Member, ...]
    numbers: tuple[str, ...]

    @functools.cached_property
    def by_count(self) -> dict[int, tuple[Member, ...]]:
        """Count of updates at which states started anew -> the members with that count.

        The members are in reverse order: so the three calls read them in the order of their
        outputs, see `compile_alone`.
        """
        found: dict[int, list[Member]] = {}
        for member in self.members[::-1]:
            found.setdefault(member.reset_at, []).append(member)
        return {count: tuple(members) for count, members in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """The step at a gradient accumulation boundary; order and formulas are DeepSpeed's.

    Source: runtime/zero/stage_1_and_2.py, `step`.

    Attributes:
        groups: the param groups to update.
        mesh: the mesh of all tensors.
        clip: largest global gradient norm, 0 for no clipping.
        skips: whether a non-finite norm keeps the step from applying.
        scaled: whether fp16's loss scales are the last of the numbers.
    """

    groups: tuple[MemberGroup, ...]
    mesh: Mesh
    clip: float
    skips: bool
    scaled: bool

    @property
    def names(self) -> list[str]:
        """Names of the parameters that it updates."""
        return [member.name for group in self.groups for member in group.members]

    @functools.cached_property
    def _layouts(self) -> dict[str, Layout]:
        """Name of a parameter -> layout of its gradient and states."""
        return {m.name: m.layout for group in self.groups for m in group.members}

    @functools.cached_property
    def _updates(self) -> dict[Hashable, GroupUpdate]:
        return {}

    def __call__(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        gradients: Mapping[str, torch.Tensor],
        numbers: Sequence[torch.Tensor],
        finite: torch.Tensor | None,
        call: Folds,
    ) -> dict[str, torch.Tensor]:
        """The tensors of `state` that the step changes, and ``"norm"``.

        The norm is that of the gradients, 0-dim fp32, unscaled and before clipping; infinity if it
        was not finite.

        Args:
            state: ``"parameter/<name>"``, `[*shape]`; ``"<slot>/<name>"``, in its stored shape;
                ``"counter/applied"`` and ``"counter/skipped"``, 0-dim fp32 and int32.
            gradients: name of a parameter -> gradient in its stored shape.
            numbers: the host's uploads: numbers of the groups, and `scale_numbers`.
            finite: 0-dim bool that must hold for the step to apply, None for no such condition.
            call: calls the norm and the updates, folded if that is wanted.
        """
        scales = None
        if self.scaled:
            now, if_applied = numbers[-1].unbind()
            numbers, scales = numbers[:-1], LossScales(now=now, if_applied=if_applied)
        keys = [group.numbers for group in self.groups]
        hypers = numbers_of_groups(keys, numbers, state["counter/skipped"])
        gradients, moved = self._directions(gradients, state, hypers, scales)
        scaled = self._norm(gradients, call)
        norm, coefficient = unscale(scaled, clip=self.clip, scales=scales)
        norm = self.mesh.whole(norm)
        apply = self._condition(norm, finite)
        new = self._counted(state, apply)
        state = {**state, **self._applied(state, moved, apply)}
        gone: list[torch.Tensor] = []
        for index, (group, hyper) in enumerate(zip(self.groups, hypers, strict=True)):
            for reset_at, members in group.by_count.items():
                count = new["counter/applied"]
                factors = group.rule.prepare(hyper, count - reset_at if reset_at else count)
                for chosen in _parts(members):
                    fetched = self._fetched(chosen, state, after=gone)
                    update = self._update(index, chosen, factors, coefficient, apply)
                    inputs = update.inputs(
                        factors=factors, coefficient=coefficient, apply=apply,
                        gradients=gradients, state=ChainMap(fetched, state),
                    )  # fmt: skip
                    # A rule without factors reads its group's numbers itself: in a folded operation
                    # they would be constants.
                    values = call(update, update, inputs) if factors else update(inputs)
                    new |= zip(update.names, values, strict=True)
                    gone = self._sent_home(chosen, new) or gone
        return new | {"norm": norm}

    def _sent_home(
        self, members: Sequence[Member], new: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Brings the members' new values to the host's memory where they rest there."""
        places = [
            (f"{slot}/{member.name}", layout)
            for member in members
            for slot, layout in (
                *member.on_host.items(),
                *[("parameter", member.at_rest)] * member.at_rest.on_host,
            )
        ]
        return [host_memory().keep(self.mesh, new[name], at.spec) for name, at in places]

    def _fetched(
        self,
        members: Sequence[Member],
        state: Mapping[str, torch.Tensor],
        *,
        after: Sequence[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Fetches the members' states that rest on the host into the devices' memory.

        They come once `after`, the part before, is on its way back to the host. A tie to anything
        else holds back no copy of libtpu's: all states would be on the devices at once.
        """
        names = [f"{slot}/{member.name}" for member in members for slot in member.on_host]
        specs = [layout.spec for member in members for layout in member.on_host.values()]
        if not names:
            return {}
        tensors = [state[name] for name in names]
        brought = host_memory().fetch(self.mesh, tensors, specs, after=after)
        return dict(zip(names, brought, strict=True))

    def _directions(
        self,
        gradients: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        hypers: Sequence[Mapping[str, torch.Tensor]],
        scales: LossScales | None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gradients with each rule's directions in their place, and the slots that changed."""
        gradients, moved = dict(gradients), {}
        for group, hyper in zip(self.groups, hypers, strict=True):
            for member in group.members if group.rule.has_direction else ():
                layout = member.layout
                grad = gradients[member.name].float()
                grad = self.mesh.lay(grad if scales is None else grad / scales.now, layout)
                with programs.scope(f"zero.direction/{member.name}"):
                    direction, changed = group.rule.direction(
                        grad, member.slots_in(state), hyper, member.on(self.mesh)
                    )
                moved |= {f"{slot}/{member.name}": value for slot, value in changed.items()}
                # The norm and the clipping expect a direction with the loss scale.
                direction = direction if scales is None else direction * scales.now
                gradients[member.name] = self.mesh.lay(direction, layout)
        return gradients, moved

    def _applied(
        self,
        state: Mapping[str, torch.Tensor],
        moved: Mapping[str, torch.Tensor],
        apply: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The slots that the directions changed, or their old values if the step doesn't apply."""
        applied = {}
        for name, value in moved.items():
            kept = value if apply is None else torch.where(apply, value, state[name])
            layout = self._layouts[name.partition("/")[2]]
            applied[name] = self.mesh.lay(kept.to(state[name].dtype), layout)
        return applied

    def _norm(self, gradients: Mapping[str, torch.Tensor], call: Folds) -> torch.Tensor:
        ordered = tuple(self._layouts[name].spec for name in gradients)

        def norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [current().global_norm(list(zip(tensors, ordered, strict=True)), self.mesh)]

        (total,) = call(("norm", ordered), norm, list(gradients.values()))
        return total

    def _condition(self, norm: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor | None:
        if finite is not None:
            return self.mesh.whole(torch.isfinite(norm) & finite)
        return self.mesh.whole(torch.isfinite(norm)) if self.skips else None

    def _counted(
        self, state: Mapping[str, torch.Tensor], apply: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        applied, skipped = state["counter/applied"], state["counter/skipped"]
        if apply is None:
            return {"counter/applied": self.mesh.whole(applied + 1)}
        return {
            "counter/applied": self.mesh.whole(applied + apply.float()),
            "counter/skipped": self.mesh.whole(skipped + (1 - apply.int())),
        }

    def _update(
        self,
        group: int,
        members: tuple[Member, ...],
        factors: Mapping[str, torch.Tensor],
        coefficient: torch.Tensor | None,
        apply: torch.Tensor | None,
    ) -> GroupUpdate:
        key = group, members[0].name
        if key not in self._updates:
            self._updates[key] = GroupUpdate(
                rule=self.groups[group].rule,
                members=members,
                factors=tuple(factors),
                clips=coefficient is not None,
                skips=apply is not None,
                mesh=self.mesh,
            )
        return self._updates[key]


def _parts(members: Sequence[Member]) -> Iterator[tuple[Member, ...]]:
    """The members in order, in parts whose states are updated together."""
    part, size = list[Member](), 0
    for member in members:
        elements = math.prod(member.layout.local) if member.on_host else 0
        if part and size + elements > _ON_DEVICE:
            yield tuple(part)
            part, size = [], 0
        part.append(member)
        size += elements
    if part:
        yield tuple(part)


Named = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ending:
    """Ends a micro-batch after its backward; it is a function that writes nothing.

    The state has names: ``"parameter/<name>"``, ``"accumulator/<name>"``, the names for `Boundary`.

    Attributes:
        path: the path of gradients to the boundary.
        boundary: ends the step; None if the micro-batch doesn't end it.
        checks: whether a non-finite loss keeps the step from applying.
    """

    path: GradientPath
    boundary: Boundary | None
    checks: bool

    def __call__(
        self,
        state: Named,
        gradients: Named,
        numbers: Sequence[torch.Tensor],
        *,
        finite: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The tensors of the state that a micro-batch changes after its backward.

        Args:
            state: the state, with what the forward wrote.
            gradients: those of the micro-batch, in their waiting form.
            numbers: the host's uploads for `Boundary`.
            finite: whether all losses of the step were finite, 0-dim.
        """
        waiting = {f"accumulator/{name}": grad for name, grad in gradients.items()}
        for name, grad in waiting.items():
            if name in state:
                waiting[name] = self.path.plus(_after(name), state[name], grad)
        if self.boundary is None:
            return waiting
        waiting = {**state, **waiting}
        new = self.boundary(
            state,
            gradients={
                name: self.path.final(name, waiting.get(f"accumulator/{name}"))
                for name in self.boundary.names
            },
            numbers=numbers,
            finite=finite if self.checks else None,
            call=Folds(),
        )
        accumulators = [name for name in state if name.startswith("accumulator/")]
        return new | {name: self.path.zeros(_after(name)) for name in accumulators}


def _after(name: str) -> str:
    return name.partition("/")[2]
