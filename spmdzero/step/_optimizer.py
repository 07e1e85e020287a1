"""The optimizer that updates shards: masters, moments and the gather of parameters."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.backend.torch_xla import global_norm, scope
from spmdzero.backend.torch_xla.mesh import DeviceMesh, PartitionSpec
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.plan import Placement, Role, ShardingPlan
from spmdzero.precision import LossScaler, PrecisionPolicy
from spmdzero.step._folds import Folds
from spmdzero.step._gradients import GradientStore
from spmdzero.step._loss_scale import LossScaled, LossScales, unscale
from spmdzero.step._numbers import upload_numbers
from spmdzero.step._schedule_hold import ScheduleHold
from spmdzero.step._torch_calls import PlannedOptimizer, refuse_closure
from spmdzero.step._update import GroupUpdate, Member
from spmdzero.step._whole_parameter import MeshTensor

# Parameters in one folded update. torch_xla takes time by the square of an operation's outputs.
_TOGETHER = 30


class ZeroOptimizer(LossScaled, PlannedOptimizer):
    """A torch optimizer whose states are shards on the mesh.

    `param_groups` work as in torch, so any `torch.optim.lr_scheduler` can drive it; numbers of a
    group reach the device as data and never recompile. `state[p]` holds the optimizer's slots
    and, where the parameter is not fp32, its ``"master"``, as global tensors that live sharded.

    Args:
        param_groups: the groups, their parameters on the device; kept, not copied.
        names: parameter -> its name in the plan.
        rules: the update of each group.
        plan, mesh, precision: where states live and in which dtype.
        gradients: where `step` finds the summed gradients.
        clip: largest global gradient norm, 0 for none.
        finite: a 0-dim bool on the device that must hold for the step to apply, None if the
            caller has no condition of its own.
        scaler: fp16's loss scale, by which the gradients are too large.

    Attributes:
        grad_norm: the global gradient norm of the latest step, 0-dim fp32 on the device,
            unscaled and before clipping; infinity where it was not finite.
        hold: what holds a schedule back for skipped steps, None without a schedule.
        folds: norm and updates as functions that may be folded.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        names: Mapping[torch.Tensor, str],
        rules: Sequence[UpdateRule],
        plan: ShardingPlan,
        mesh: DeviceMesh,
        precision: PrecisionPolicy,
        gradients: GradientStore,
        clip: float,
        finite: Callable[[], torch.Tensor | None],
        scaler: LossScaler | None = None,
    ) -> None:
        # DeepSpeed's Muon, the optimizer of two rules, has no defaults either.
        super().__init__(param_groups, dict(rules[0].defaults) if len(set(rules)) == 1 else {})
        self._planned = True
        # torch copies the dicts; a schedule made on the user's own optimizer must reach ours.
        self.param_groups = param_groups
        for rule, group in zip(rules, param_groups, strict=True):
            for key, value in rule.defaults.items():
                group.setdefault(key, value)
            rule.validate(group)
        self._rules, self._plan, self._mesh, self._precision = tuple(rules), plan, mesh, precision
        self._names, self._gradients, self._clip, self._finite = names, gradients, clip, finite
        self._applied = mesh.place(torch.zeros((), dtype=torch.float32))
        self._skipped = mesh.place(torch.zeros((), dtype=torch.int32))
        self.loss_scaler = scaler
        self.folds = Folds()
        # Their parameters live as long as this optimizer's names of them.
        self._updates: dict[Hashable, GroupUpdate] = {}
        self.hold: ScheduleHold | None = None
        self.grad_norm: torch.Tensor | None = None
        for rule, group in zip(rules, param_groups, strict=True):
            for parameter in group["params"]:
                if plan[names[parameter]].trainable:
                    self._allocate(parameter, rule, group)

    @property
    def skipped_steps(self) -> int:
        """Steps that left the weights alone, for a norm that was not finite; reads one scalar."""
        skipped = int(self._skipped.item())
        if self.hold is not None:
            self.hold.settle(skipped)
        return skipped

    def forget_skip(self) -> None:
        """Doesn't count the latest skipped step: it raised, and will be done again."""
        self._skipped.sub_(1)
        self._mesh.mark(self._skipped)

    @property
    def can_skip(self) -> bool:
        """Whether a gradient norm that is not finite keeps a step from the weights."""
        return self._precision.skip_nonfinite

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped for a norm that was not finite; reads one scalar."""
        return self.can_skip and self.grad_norm is not None and self.grad_norm.item() == math.inf

    def named_states(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``<slot>/<parameter name>``, and the counters."""
        states = {
            f"{slot}/{self._names[parameter]}": tensor
            for parameter in self._trainable()
            for slot, tensor in self.state[parameter].items()
        }
        return states | {"counter/applied": self._applied, "counter/skipped": self._skipped}

    def _trainable(self) -> Iterable[nn.Parameter]:
        members = [p for group in self.param_groups for p in group["params"]]
        for parameter in members:
            if parameter not in self._names:
                raise SpmdZeroUsageError(
                    f"a param group holds a tensor of shape {list(parameter.shape)} that "
                    "initialize was not given: its states have no place in the sharding plan. Pass "
                    "all parameters as model_parameters"
                )
        # The plan's word, not requires_grad, which may change after states were allocated.
        return (p for p in members if self._plan[self._names[p]].trainable)

    def _allocate(self, parameter: nn.Parameter, rule: UpdateRule, group: dict[str, Any]) -> None:
        name = self._names[parameter]
        tensor = self._plan[name]
        state = self.state[parameter]
        master = tensor.placement(Role.MASTER)
        if master is not None:
            state["master"] = self._mesh.store(parameter.detach().float(), master)
        moment = tensor.placement(Role.MOMENT)
        if moment is not None:
            spec = self._spec(parameter, moment)
            for slot in rule.slots:
                zeros = self._mesh.stored_zeros(tensor.shape, moment, self._precision.moment)
                value = rule.initial(slot, group)
                state[slot] = self._mesh.mark(zeros + value, spec) if value else zeros
        for scalar in rule.scalars:
            value = torch.tensor(rule.initial(scalar, group), dtype=torch.float32)
            state[scalar] = self._mesh.place(value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Norm, clip, update and gather, as one pending program; moves nothing to the host.

        Order and formulas are DeepSpeed's (runtime/zero/stage_1_and_2.py, `step`).
        """
        refuse_closure(closure)
        self._gradients.reduce_deferred()
        gradients = {p: self._gradients.take(self._names[p]) for p in self._trainable()}
        placements = {p: self._final_placement(p) for p in gradients}
        scales = LossScales.upload(self.loss_scaler, self._mesh) if self.loss_scaler else None
        hypers = upload_numbers(
            self._rules,
            self.param_groups,
            mesh=self._mesh,
            hold=self.hold,
            skipped=self._skipped,
        )
        moved = self._directions(gradients, placements, hypers, scales)
        scaled = self._norm(gradients, placements)
        norm, coefficient = unscale(scaled, clip=self._clip, scales=scales)
        self.grad_norm = self._mesh.mark(norm)
        apply = self._condition(norm)
        self._count(apply)
        for old, new, spec in moved:
            self._write(old, new, spec, apply)
        for rule, group, hyper in zip(self._rules, self.param_groups, hypers, strict=True):
            factors = rule.prepare(hyper, self._applied)
            # So that the three calls read them in the order of their outputs: `PendingProgram`.
            members = [p for p in reversed(group["params"]) if p in gradients]
            for start in range(0, len(members), _TOGETHER):
                self._update(
                    rule, members[start : start + _TOGETHER], gradients, factors, coefficient, apply
                )
        self._gradients.clear()

    def _condition(self, norm: torch.Tensor) -> torch.Tensor | None:
        finite = self._finite()
        if finite is not None:
            return self._mesh.mark(torch.isfinite(norm) & finite)
        return self._mesh.mark(torch.isfinite(norm)) if self._precision.skip_nonfinite else None

    def _count(self, apply: torch.Tensor | None) -> None:
        if apply is None:
            self._applied.add_(1)
        else:
            self._applied.add_(apply.float())
            self._skipped.add_(1 - apply.int())
            self._mesh.mark(self._skipped)
        self._mesh.mark(self._applied)

    def _directions(
        self,
        gradients: dict[nn.Parameter, torch.Tensor],
        placements: Mapping[nn.Parameter, Placement],
        hypers: Sequence[Mapping[str, torch.Tensor]],
        scales: LossScales | None,
    ) -> list[tuple[torch.Tensor, torch.Tensor, PartitionSpec]]:
        """Puts each rule's direction in its gradient's place.

        Returns the state that changed for it, old and new, to be written if the step applies.
        """
        moved = []
        for rule, group, hyper in zip(self._rules, self.param_groups, hypers, strict=True):
            for parameter in group["params"]:
                if parameter not in gradients or not rule.has_direction:
                    continue
                placement, state = placements[parameter], self.state[parameter]
                spec = self._spec(parameter, placement)
                grad = gradients[parameter].float()
                grad = self._mesh.mark(grad if scales is None else grad / scales.now, spec)
                whole = self._whole(parameter, placement)
                with scope(f"zero.direction/{self._names[parameter]}"):
                    direction, new = rule.direction(grad, state, hyper, whole)
                # The norm and the clipping expect the loss scale in it.
                direction = direction if scales is None else direction * scales.now
                gradients[parameter] = self._mesh.mark(direction, spec)
                moved += [(state[slot], value, spec) for slot, value in new.items()]
        return moved

    def _norm(
        self,
        gradients: Mapping[nn.Parameter, torch.Tensor],
        placements: Mapping[nn.Parameter, Placement],
    ) -> torch.Tensor:
        specs = [self._spec(parameter, placements[parameter]) for parameter in gradients]

        def norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [global_norm(list(zip(tensors, specs, strict=True)), self._mesh)]

        (total,) = self.folds(("norm", tuple(specs)), norm, list(gradients.values()))
        return total

    def _update(
        self,
        rule: UpdateRule,
        parameters: Sequence[nn.Parameter],
        gradients: Mapping[nn.Parameter, torch.Tensor],
        factors: Mapping[str, torch.Tensor],
        coefficient: torch.Tensor | None,
        apply: torch.Tensor | None,
    ) -> None:
        update = self._group_update(
            rule,
            parameters,
            factors=tuple(factors),
            clips=coefficient is not None,
            skips=apply is not None,
        )
        inputs = update.inputs(
            factors=factors,
            coefficient=coefficient,
            apply=apply,
            members=[(gradients[p], p, self.state[p]) for p in parameters],
        )
        # A rule without factors reads its group's numbers itself: folded, they would be constants.
        values = iter(self.folds(update, update, inputs) if factors else update(inputs))
        for parameter, member in zip(parameters, update.members, strict=True):
            parameter.copy_(next(values))
            # Without this mark a parameter drifts to the sharding of its update: to ZeRO-3.
            self._mesh.mark(parameter)
            state, spec = self.state[parameter], update.spec(member)
            for slot in member.slots:
                self._write(state[slot], next(values), () if slot in rule.scalars else spec)

    def _group_update(
        self, rule: UpdateRule, parameters: Sequence[nn.Parameter], **rest: Any
    ) -> GroupUpdate:
        slots = [tuple(self.state[p]) for p in parameters]
        key = rule, tuple(map(id, parameters)), tuple(slots), *rest.values()
        if key not in self._updates:
            members = tuple(
                Member(
                    name=self._names[p],
                    shape=tuple(p.shape),
                    dtype=p.dtype,
                    slots=names,
                    placement=self._final_placement(p),
                )
                for p, names in zip(parameters, slots, strict=True)
            )
            self._updates[key] = GroupUpdate(rule=rule, members=members, mesh=self._mesh, **rest)
        return self._updates[key]

    def _write(
        self,
        old: torch.Tensor,
        new: torch.Tensor,
        spec: PartitionSpec,
        apply: torch.Tensor | None = None,
    ) -> None:
        # In place, or XLA can't reuse the buffer of the old state (donation).
        old.copy_(new if apply is None else torch.where(apply, new, old))
        self._mesh.mark(old, spec)

    def _whole(self, parameter: nn.Parameter, placement: Placement) -> MeshTensor:
        return MeshTensor(mesh=self._mesh, placement=placement, shape=tuple(parameter.shape))

    def _final_placement(self, parameter: nn.Parameter) -> Placement:
        placement = self._plan[self._names[parameter]].placement(Role.GRADIENT)
        assert placement is not None
        return placement

    def _spec(self, parameter: nn.Parameter, placement: Placement) -> tuple:
        return placement.partition_spec(tuple(parameter.shape), self._mesh.spec)

    @torch.no_grad()
    def refresh_masters(self, written: Collection[torch.Tensor] | None = None) -> None:
        """Takes over parameters that were written from outside, as `load_state_dict` does.

        Args:
            written: those parameters, None for all. The masters of others keep the digits that
                a bf16 or fp16 parameter has not.
        """
        for parameter in self._trainable():
            if written is not None and parameter not in written:
                continue
            self._mesh.mark(parameter)
            master = self.state[parameter].get("master")
            placement = self._plan[self._names[parameter]].placement(Role.MASTER)
            if master is not None and placement is not None:
                master.copy_(self._mesh.store(parameter.detach().float(), placement))
                self._mesh.mark(master, self._spec(parameter, placement))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._gradients.forget(self._names)
