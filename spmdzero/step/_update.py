"""What the parameters of one group and their states become: values, nothing is written."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from spmdzero.backend.torch_xla import scope
from spmdzero.backend.torch_xla.mesh import DeviceMesh, PartitionSpec
from spmdzero.optim import UpdateRule
from spmdzero.plan import Placement
from spmdzero.step._whole_parameter import MeshTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter as an update sees it.

    Attributes:
        name: its name in the plan.
        shape: its own.
        dtype: its own.
        slots: the keys of its state.
        placement: how its gradient, its master and its slots are stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: tuple[str, ...]
    placement: Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GroupUpdate:
    """The update of some parameters of one group, as a function of a flat list of tensors.

    Attributes:
        rule: the group's.
        members: the parameters.
        factors: names of what `rule.prepare` returns.
        clips, skips: whether gradients are multiplied, and whether the step may not apply.
        mesh: where everything lives.
    """

    rule: UpdateRule
    members: tuple[Member, ...]
    factors: tuple[str, ...]
    clips: bool
    skips: bool
    mesh: DeviceMesh

    def inputs(
        self,
        *,
        factors: Mapping[str, torch.Tensor],
        coefficient: torch.Tensor | None,
        apply: torch.Tensor | None,
        members: Sequence[tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]],
    ) -> list[torch.Tensor]:
        """What `__call__` takes, of each member the gradient, the parameter and the state."""
        shared = [factors[name] for name in self.factors]
        shared += [tensor for tensor in (coefficient, apply) if tensor is not None]
        for member, (grad, parameter, state) in zip(self.members, members, strict=True):
            shared += [grad, parameter, *(state[slot] for slot in member.slots)]
        return shared

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """For each member the new parameter and the new state, not marked.

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
        mesh, rule, placement, spec = self.mesh, self.rule, member.placement, self.spec(member)
        master = state.get("master")
        weights = master if master is not None else mesh.store(parameter.detach(), placement)
        # bf16 masters and states are updated in fp32 and rounded.
        weights = weights.float()
        held = {slot: state[slot].float() for slot in (*rule.slots, *rule.scalars)}
        whole = MeshTensor(mesh=mesh, placement=placement, shape=member.shape)

        def keep(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
            return new if apply is None else torch.where(apply, new, old)

        with scope(f"zero.update/{member.name}"):
            grad = mesh.mark(grad, spec)
            new_weights, new = rule.update(weights, grad, held, factors, whole, keep)
            new_weights = keep(new_weights, weights)
        new = {**new, "master": new_weights}
        # Cast and mark first: the gather would otherwise move fp32.
        stored = mesh.mark(new_weights.to(member.dtype), spec)
        with scope(f"zero.parameter/{member.name}"):
            gathered = mesh.gather(stored, placement, member.shape)
        return [gathered, *(new[slot] for slot in member.slots)]

    def spec(self, member: Member) -> PartitionSpec:
        """The sharding of a member's stored form."""
        return member.placement.partition_spec(member.shape, self.mesh.spec)
