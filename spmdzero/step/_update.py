"""The update of parameters and their states, as a pure function of values."""

import dataclasses
import math
from collections.abc import Mapping

import torch

from spmdzero.backend import (
    Mesh,
    arrays,
    gather,
    programs,
    relaid,
    same_on_hosts,
    store,
)
from spmdzero.optim import Terms, UpdateRule, decoded, encoded, is_signed
from spmdzero.plan import Layout, coded_slot, scale_slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTensor:
    """The `WholeTensor` of one parameter's stored form.

    Attributes:
        mesh: the mesh of the parameter's shards.
        layout: the layout of the shards.
        name: the parameter's name in the model.
    """

    mesh: Mesh
    layout: Layout
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        return self.layout.shape

    def sum(self, stored: torch.Tensor) -> torch.Tensor:
        """The sum over all shards, without padding: one all-reduce of a scalar."""
        elements = math.prod(self.shape)
        if stored.numel() != elements:
            # Padding belongs to no parameter: an update may have any value there, also 0 / 0.
            place = torch.arange(stored.numel(), device=stored.device)
            stored = torch.where(place < elements, stored, torch.zeros_like(stored))
        return self.mesh.whole(stored.sum())

    def gather(self, stored: torch.Tensor) -> torch.Tensor:
        """The tensor `[*shape]` on every device: one all-gather in `stored`'s dtype."""
        # Without the mark the compiler could gather the operands of `stored` instead, in fp32.
        return gather(self.mesh, self.mesh.lay(stored, self.layout), self.layout)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor `[*shape]` to shards: each device keeps its own part."""
        # Without the mark the compiler spreads the computation of `tensor` over the devices, and
        # each of Muon's matrix products becomes an all-reduce.
        return store(self.mesh, self.mesh.whole(arrays.fresh(tensor)), self.layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter for an update.

    Attributes:
        name: the parameter's name in the plan.
        dtype: the parameter's dtype.
        slots: the keys of its state.
        layout: the layout of its gradient, its master and the states of its shape.
        at_rest: the layout of the parameter itself between steps.
        layouts: where each of `slots` lives between steps.
        eight_bits: the slots that rest in codes of 8 bits, whose scales are slots too.
        reset_at: the count of updates when its state started anew.
    """

    name: str
    dtype: torch.dtype
    slots: tuple[str, ...]
    layout: Layout
    at_rest: Layout
    layouts: tuple[Layout, ...]
    eight_bits: tuple[str, ...] = ()
    reset_at: int = 0

    @property
    def on_host(self) -> dict[str, Layout]:
        """The slots that rest in host memory, and their layouts."""
        pairs = zip(self.slots, self.layouts, strict=True)
        return {slot: layout for slot, layout in pairs if layout.on_host}

    def slots_in(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Slot -> tensor, taken from ``"<slot>/<name>"`` in `state`."""
        return {slot: state[f"{slot}/{self.name}"] for slot in self.slots}

    def on(self, mesh: Mesh) -> MeshTensor:
        """The whole parameter behind its shards."""
        return MeshTensor(mesh=mesh, layout=self.layout, name=self.name)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupUpdate:
    """The update of some parameters of one group, as a function of a flat list of tensors.

    Attributes:
        rule: the group's update rule.
        members: the parameters.
        factors: names of the factors that `rule.prepare` returns.
        clips, skips: whether gradients are multiplied by a coefficient, and whether the step may be
            skipped.
        mesh: the mesh of all tensors.
    """

    rule: UpdateRule
    members: tuple[Member, ...]
    factors: tuple[str, ...]
    clips: bool
    skips: bool
    mesh: Mesh

    def inputs(
        self,
        *,
        factors: Mapping[str, torch.Tensor],
        coefficient: torch.Tensor | None,
        apply: torch.Tensor | None,
        gradients: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """The inputs of `__call__`: for each member the gradient, the parameter and the state."""
        shared = [factors[name] for name in self.factors]
        shared += [tensor for tensor in (coefficient, apply) if tensor is not None]
        for member in self.members:
            shared += [gradients[member.name], state[f"parameter/{member.name}"]]
            shared += member.slots_in(state).values()
        return shared

    @property
    def names(self) -> list[str]:
        """Names of the tensors that `__call__` returns."""
        return [
            f"{role}/{member.name}"
            for member in self.members
            for role in ("parameter", *member.slots)
        ]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The new parameter and the new state of each member, marked.

        Formulas and order are DeepSpeed's (runtime/zero/stage_1_and_2.py, `step`).
        """
        given = iter(inputs)
        factors = {name: next(given) for name in self.factors}
        coefficient = next(given) if self.clips else None
        apply = next(given) if self.skips else None
        results: list[torch.Tensor] = []
        for member in self.members:
            grad, parameter = next(given).float(), next(given)
            state = {slot: next(given) for slot in member.slots}
            if coefficient is not None:
                grad = grad * coefficient
            results += self._update(member, grad, parameter, state, factors, apply)
        return results

    def _update(
        self,
        member: Member,
        grad: torch.Tensor,
        parameter: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        factors: Mapping[str, torch.Tensor],
        apply: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        mesh, rule, layout = self.mesh, self.rule, member.layout
        weights = state.get("master")
        if weights is None:
            weights = relaid(mesh, parameter.detach(), now=member.at_rest, to=layout)
        # bf16 masters and states are updated in fp32 and rounded.
        weights = weights.float()

        def keep(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return new if apply is None else torch.where(apply, new, old)

        # A torch optimizer may make tensors from numbers.
        with programs.scope(f"zero.update/{member.name}"), same_on_hosts():
            grad = mesh.lay(grad, layout)
            terms = Terms(factors=factors, whole=member.on(mesh), keep=keep)
            held = _in_fp32(member, state)
            new_weights, new = rule.update(weights, grad, held, terms)
            new_weights = keep(new_weights, weights)
            new = _at_rest(member, {**new, "master": new_weights}, state, apply)
        # The cast and the mark come first: the gather would otherwise move fp32.
        stored = mesh.lay(new_weights.to(member.dtype), layout)
        with programs.scope(f"zero.parameter/{member.name}"):
            new_parameter = relaid(mesh, stored, now=layout, to=member.at_rest)
        # With these marks JAX's backend needs no operation for each state of a folded update.
        pairs = zip(member.slots, member.layouts, strict=True)
        return [new_parameter, *(mesh.lay(new[slot], at) for slot, at in pairs)]


def _in_fp32(member: Member, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states as a rule has them, without master: values in the place of codes and scales."""
    values = {}
    for slot, tensor in state.items():
        if slot in member.eight_bits:
            scales = state[scale_slot(slot)]
            values[slot] = decoded(tensor, scales, signed=is_signed(slot))
        elif slot != "master" and coded_slot(slot) not in member.eight_bits:
            values[slot] = tensor.float()
    return values


def _at_rest(
    member: Member,
    new: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
    apply: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """New states in the form of the old ones.

    Codes of the same values need not be the same codes, so that a step that doesn't apply keeps
    the old ones.
    """
    values = {slot: new[slot].to(tensor.dtype) for slot, tensor in old.items() if slot in new}
    for slot in member.eight_bits:
        scale = scale_slot(slot)
        made = encoded(new[slot], scales=old[scale].shape, signed=is_signed(slot))
        for key, value in zip((slot, scale), made, strict=True):
            values[key] = value if apply is None else torch.where(apply, value, old[key])
    return values


def master_of_written(
    mesh: Mesh, parameter: torch.Tensor, master: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """The master of a parameter that was written, in the master's stored form and dtype.

    An element that the write left alone equals the rounded master, and keeps the master's digits:
    otherwise a forward that clamps a bf16 weight would undo all updates below bf16's steps.

    Args:
        mesh: the mesh of both tensors.
        parameter: the written parameter, `[*shape]`.
        master: the master before the write.
        layout: the master's layout.
    """
    now = store(mesh, parameter.detach(), layout)
    same = now == master.to(parameter.dtype)
    return torch.where(same, master, now.to(master.dtype))
