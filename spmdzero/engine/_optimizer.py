"""The optimizer that updates shards: masters, moments and the gather of parameters."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.engine._gradients import GradientStore
from spmdzero.engine._hold import ROWS, ScheduleHold
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule, clip_coefficient
from spmdzero.plan import Placement, Role, ShardingPlan
from spmdzero.precision import LossScaler, PrecisionPolicy
from spmdzero.xla import global_norm, scope
from spmdzero.xla.mesh import DeviceMesh


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose states are shards on the mesh.

    `param_groups` work as in torch, so any `torch.optim.lr_scheduler` can drive it; numbers of a
    group reach the device as data and never recompile. `state[p]` holds the optimizer's slots
    and, where the parameter is not fp32, its ``"master"``, as global tensors that live sharded.

    Args:
        param_groups: the groups, their parameters on the device; kept, not copied.
        names: parameter -> its name in the plan.
        rule: the update.
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
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        names: Mapping[torch.Tensor, str],
        rule: UpdateRule,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        precision: PrecisionPolicy,
        gradients: GradientStore,
        clip: float,
        finite: Callable[[], torch.Tensor | None],
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(param_groups, dict(rule.defaults))
        # torch copies the dicts; a schedule made on the user's own optimizer must reach ours.
        self.param_groups = param_groups
        for group in param_groups:
            for key, value in rule.defaults.items():
                group.setdefault(key, value)
            rule.validate(group)
        self.rule, self._plan, self._mesh, self._precision = rule, plan, mesh, precision
        self._names, self._gradients, self._clip, self._finite = names, gradients, clip, finite
        self._applied = mesh.place(torch.zeros(()))
        self._skipped = mesh.place(torch.zeros((), dtype=torch.int32))
        self._not_counted = 0
        self.loss_scaler = scaler
        self.hold: ScheduleHold | None = None
        self.grad_norm: torch.Tensor | None = None
        for parameter in self._trainable():
            self._allocate(parameter)

    @property
    def skipped_steps(self) -> int:
        """Steps that left the weights alone, for a norm that was not finite; reads one scalar."""
        skipped = int(self._skipped.item()) - self._not_counted
        if self.hold is not None:
            self.hold.settle(skipped)
        return skipped

    def forget_skip(self) -> None:
        """Doesn't count the latest skipped step: it raised, and will be done again."""
        self._not_counted += 1

    @property
    def can_skip(self) -> bool:
        """Whether a gradient norm that is not finite keeps a step from the weights."""
        return self._precision.skip_nonfinite

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped for a norm that was not finite; reads one scalar."""
        return self.can_skip and self.grad_norm is not None and self.grad_norm.item() == math.inf

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1.0 but for fp16."""
        return self.loss_scaler.cur_scale if self.loss_scaler else 1.0

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.loss_scaler is None:
            raise SpmdZeroUsageError("only fp16 has a loss scale, this run has none to set")
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.loss_scaler is not None and self.loss_scaler.dynamic

    def named_states(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``<slot>/<parameter name>``, and the counters."""
        states = {
            f"{slot}/{self._names[parameter]}": tensor
            for parameter in self._trainable()
            for slot, tensor in self.state[parameter].items()
        }
        return states | {"counter/applied": self._applied, "counter/skipped": self._skipped}

    def _trainable(self) -> Iterable[nn.Parameter]:
        members = (p for group in self.param_groups for p in group["params"])
        # The plan's word, not requires_grad, which may change after states were allocated.
        return (p for p in members if self._plan[self._names[p]].trainable)

    def _allocate(self, parameter: nn.Parameter) -> None:
        name = self._names[parameter]
        tensor = self._plan[name]
        state = self.state[parameter]
        master = tensor.placement(Role.MASTER)
        if master is not None:
            state["master"] = self._mesh.store(parameter.detach().float(), master)
        moment = tensor.placement(Role.MOMENT)
        if moment is not None:
            for slot in self.rule.slots:
                state[slot] = self._mesh.stored_zeros(tensor.shape, moment, torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Norm, clip, update and gather, as one pending program; moves nothing to the host.

        Order and formulas are DeepSpeed's (runtime/zero/stage_1_and_2.py, `step`).
        """
        self._gradients.reduce_deferred()
        gradients = {p: self._gradients.take(self._names[p]) for p in self._trainable()}
        placements = {p: self._final_placement(p) for p in gradients}
        scaled = global_norm(
            [(g, self._spec(p, placements[p])) for p, g in gradients.items()], self._mesh
        )
        norm, coefficient = self._unscale(scaled)
        self.grad_norm = norm
        apply, behind = self._condition(norm), self._behind()
        self._count(apply)
        all_factors = self._factors(behind)
        for group, factors in zip(self.param_groups, all_factors, strict=True):
            for parameter in group["params"]:
                if parameter in gradients:
                    grad = gradients[parameter].float()
                    if coefficient is not None:
                        grad = grad * coefficient
                    self._update(parameter, grad, placements[parameter], factors, apply)
        self._gradients.clear()

    def _unscale(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The norm without the loss scale, and what gradients are to be multiplied by."""
        mesh, clip = self._mesh, self._clip
        if self.loss_scaler is None:
            coefficient = clip_coefficient(scaled, clip) if clip > 0 else None
            return mesh.mark(_infinite_if_invalid(scaled)), coefficient
        # As data: the scale changes, and a Python number would be another program.
        scales = torch.tensor([self.loss_scaler.cur_scale, self.loss_scaler.scale_if_applied()])
        now, if_applied = mesh.place(scales).unbind()
        coefficient = 1.0 / if_applied
        if clip > 0:
            coefficient = coefficient * clip_coefficient(scaled / if_applied, clip)
        return mesh.mark(_infinite_if_invalid(scaled) / now), coefficient

    def _condition(self, norm: torch.Tensor) -> torch.Tensor | None:
        finite = self._finite()
        if finite is not None:
            return self._mesh.mark(torch.isfinite(norm) & finite)
        return self._mesh.mark(torch.isfinite(norm)) if self._precision.skip_nonfinite else None

    def _behind(self) -> torch.Tensor | None:
        """How many positions the schedule is ahead of the steps that were not skipped."""
        if self.hold is None:
            return None
        held = torch.tensor(self.hold.held + self._not_counted, dtype=torch.int32)
        return (self._skipped - self._mesh.place(held)).clamp(0, ROWS - 1)

    def _count(self, apply: torch.Tensor | None) -> None:
        if apply is None:
            self._applied.add_(1)
        else:
            self._applied.add_(apply.float())
            self._skipped.add_(1 - apply.int())
            self._mesh.mark(self._skipped)
        self._mesh.mark(self._applied)

    def _factors(self, behind: torch.Tensor | None) -> list[dict[str, torch.Tensor]]:
        hypers = [self.rule.hyper(group) for group in self.param_groups]
        # One upload for all numbers of all groups: as Python floats they would be a transfer
        # each, and 0.0 and 1.0 would be constants, which recompiles when a schedule hits them.
        numbers = [value for hyper in hypers for value in hyper.values()]
        if self.hold is None or behind is None:
            row = self._mesh.place(torch.tensor(numbers, dtype=torch.float32))
        else:
            table = self._mesh.place(self.hold.table(numbers, self.param_groups))
            row = table.index_select(0, behind.reshape(1).long())[0]
        on_device = iter(row.unbind())
        return [
            self.rule.prepare({key: next(on_device) for key in hyper}, self._applied)
            for hyper in hypers
        ]

    def _update(
        self,
        parameter: nn.Parameter,
        grad: torch.Tensor,
        placement: Placement,
        factors: Mapping[str, torch.Tensor],
        apply: torch.Tensor | None,
    ) -> None:
        mesh, spec, state = self._mesh, self._spec(parameter, placement), self.state[parameter]
        master = state.get("master")
        weights = master if master is not None else mesh.store(parameter.detach(), placement)
        slots = {slot: state[slot] for slot in self.rule.slots}
        new_weights, new_slots = self.rule.update(weights, mesh.mark(grad, spec), slots, factors)
        for old, new in [(slots[slot], new_slots[slot]) for slot in slots] + (
            [(master, new_weights)] if master is not None else []
        ):
            # In place, or XLA can't reuse the buffer of the old state (donation).
            old.copy_(new if apply is None else torch.where(apply, new, old))
            mesh.mark(old, spec)
        if apply is not None:
            new_weights = torch.where(apply, new_weights, weights)
        # Cast and mark first: the gather would otherwise move fp32.
        stored = mesh.mark(new_weights.to(parameter.dtype), spec)
        with scope(f"zero.parameter/{self._names[parameter]}"):
            parameter.copy_(mesh.gather(stored, placement, tuple(parameter.shape)))
            # Without this mark a parameter drifts to the sharding of its update: to ZeRO-3.
            mesh.mark(parameter)

    def _final_placement(self, parameter: nn.Parameter) -> Placement:
        placement = self._plan[self._names[parameter]].placement(Role.GRADIENT)
        assert placement is not None
        return placement

    def _spec(self, parameter: nn.Parameter, placement: Placement) -> tuple:
        return placement.partition_spec(tuple(parameter.shape), self._mesh.spec)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Takes over parameters that were written from outside, as `load_state_dict` does."""
        for parameter in self._trainable():
            self._mesh.mark(parameter)
            master = self.state[parameter].get("master")
            placement = self._plan[self._names[parameter]].placement(Role.MASTER)
            if master is not None and placement is not None:
                master.copy_(self._mesh.store(parameter.detach().float(), placement))
                self._mesh.mark(master, self._spec(parameter, placement))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._gradients.clear()


def _infinite_if_invalid(norm: torch.Tensor) -> torch.Tensor:
    # DeepSpeed reports infinity for a norm that is NaN too.
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, math.inf))
