"""The optimizer that updates shards: masters, moments and the gather of parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.engine._gradients import GradientStore
from spmdzero.optim import UpdateRule, clip_coefficient
from spmdzero.plan import Placement, Role, ShardingPlan
from spmdzero.precision import PrecisionPolicy
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
        self.grad_norm: torch.Tensor | None = None
        for parameter in self._trainable():
            self._allocate(parameter)

    @property
    def skipped_steps(self) -> int:
        """Steps that left the weights alone, for a norm that was not finite; reads one scalar."""
        return int(self._skipped.item())

    @property
    def can_skip(self) -> bool:
        """Whether a gradient norm that is not finite keeps a step from the weights."""
        return self._precision.skip_nonfinite

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
        gradients = {p: self._gradients.take(self._names[p]) for p in self._trainable()}
        placements = {p: self._final_placement(p) for p in gradients}
        norm = global_norm(
            [(g, self._spec(p, placements[p])) for p, g in gradients.items()], self._mesh
        )
        self.grad_norm = norm
        coefficient = clip_coefficient(norm, self._clip) if self._clip > 0 else None
        apply = self._condition(norm)
        self._count(apply)
        for group, factors in zip(self.param_groups, self._factors(), strict=True):
            for parameter in group["params"]:
                if parameter in gradients:
                    grad = gradients[parameter].float()
                    if coefficient is not None:
                        grad = grad * coefficient
                    self._update(parameter, grad, placements[parameter], factors, apply)
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

    def _factors(self) -> list[dict[str, torch.Tensor]]:
        hypers = [self.rule.hyper(group) for group in self.param_groups]
        # One upload for all numbers of all groups: as Python floats they would be a transfer
        # each, and 0.0 and 1.0 would be constants, which recompiles when a schedule hits them.
        numbers = [value for hyper in hypers for value in hyper.values()]
        on_device = iter(self._mesh.place(torch.tensor(numbers, dtype=torch.float32)).unbind())
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
