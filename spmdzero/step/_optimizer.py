"""The optimizer that updates shards: masters, moments and the gather of parameters."""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.backend import REPLICATED, Mesh, relaid, resting, stored_zeros
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.plan import Role, ShardingPlan
from spmdzero.precision import LossScaler, PrecisionPolicy
from spmdzero.step._autograd import autograd_grad
from spmdzero.step._boundary import Boundary, MemberGroup
from spmdzero.step._deepspeed_names import NamedAsDeepSpeeds
from spmdzero.step._folds import Folds
from spmdzero.step._gradients import GradientStore
from spmdzero.step._numbers import group_numbers, number_keys, scale_numbers
from spmdzero.step._schedule_hold import ScheduleHold
from spmdzero.step._state_dict import WholeStates
from spmdzero.step._torch_calls import refuse_closure
from spmdzero.step._update import Member, master_of_written


class ZeroOptimizer(NamedAsDeepSpeeds, WholeStates):
    """A torch optimizer whose states are shards on the mesh.

    `param_groups` work as in torch, so any `torch.optim.lr_scheduler` can drive it; numbers of a
    group reach the device as data and never recompile. `state[p]` holds the optimizer's slots
    and, where the parameter is not fp32, its ``"master"``, as global tensors that live sharded.
    What is cleared of it starts anew with the next step, as torch's does; masters stay.

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
        reset_at: name of a parameter whose state started anew apart from others' -> the count of
            updates then.
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
        mesh: Mesh,
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
            if group["params"]:
                rule.validate(group)
        self._rules, self._plan, self._mesh, self._precision = tuple(rules), plan, mesh, precision
        self._names, self._gradients, self._clip, self._finite = names, gradients, clip, finite
        self._applied = mesh.place(torch.zeros((), dtype=torch.float32))
        self._skipped = mesh.place(torch.zeros((), dtype=torch.int32))
        self.scaler = scaler
        self.folds = Folds()
        self.reset_at: dict[str, int] = {}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        # Their parameters live as long as this optimizer's names of them.
        self._boundaries: dict[Hashable, Boundary] = {}
        self.hold: ScheduleHold | None = None
        self.grad_norm: torch.Tensor | None = None
        for rule, group in zip(rules, param_groups, strict=True):
            for parameter in group["params"]:
                if plan[names[parameter]].trainable:
                    self._allocate(parameter, rule, group)

        # Plain SGD keeps nothing.
        self._stateful = {p for p, state in self.state.items() if state}

    @property
    def skipped_steps(self) -> int:
        """Steps that left the weights alone, for a norm that was not finite; reads one scalar."""
        skipped = int(self._skipped.item())
        if self.hold is not None:
            self.hold.settle(skipped)
        return skipped

    @property
    def gradients_wait(self) -> bool:
        """Whether a backward pass has left gradients that no step has used."""
        return self._gradients.waiting or any(
            autograd_grad(parameter) is not None for parameter in self._names
        )

    def forget_skip(self) -> None:
        """Doesn't count the latest skipped step: it raised, and will be done again."""
        self._mesh.commit(self._skipped, self._skipped - 1, REPLICATED)

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

    def _trainable(self) -> list[nn.Parameter]:
        members = [p for group in self.param_groups for p in group["params"]]
        for parameter in members:
            if parameter not in self._names:
                raise SpmdZeroUsageError(
                    f"a param group holds a tensor of shape {list(parameter.shape)} that "
                    "initialize was not given: its states have no place in the sharding plan. Pass "
                    "all parameters as model_parameters"
                )
        # The plan's word, not requires_grad, which may change after states were allocated.
        return [p for p in members if self._plan[self._names[p]].trainable]

    def _allocate(self, parameter: nn.Parameter, rule: UpdateRule, group: dict[str, Any]) -> None:
        name = self._names[parameter]
        tensor = self._plan[name]
        state = self.state[parameter]
        if tensor.placement(Role.MASTER) is not None:
            # It has digits that the parameter has not, and is no state in torch.
            if parameter not in self._masters:
                layout = self._plan.at_rest(f"{Role.MASTER}/{name}")
                self._masters[parameter] = resting(self._mesh, self._master_of(parameter), layout)
            state["master"] = self._masters[parameter]
        for slot in rule.slots:
            layout, value = self._plan.at_rest(f"{slot}/{name}"), rule.initial(slot, group)
            zeros = stored_zeros(self._mesh, layout, self._precision.moment)
            made = self._mesh.mark(zeros + value, layout.spec) if value else zeros
            state[slot] = resting(self._mesh, made, layout)
        for scalar in rule.scalars:
            value = torch.tensor(rule.initial(scalar, group), dtype=torch.float32)
            state[scalar] = self._mesh.place(value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Norm, clip, update and gather, as one pending program; moves nothing to the host."""
        refuse_closure(closure)
        self.renew()
        self._gradients.reduce_deferred()
        own, boundary = self.tensors(), self.boundary()
        new = boundary(
            own,
            gradients={name: self._gradients.take(name) for name in boundary.names},
            numbers=[self._mesh.place(host) for host in self.host_numbers()],
            finite=self._finite(),
            call=self.folds,
        )
        self.grad_norm = new.pop("norm")
        for name, value in new.items():
            # An unmarked parameter drifts to the sharding of its update: to ZeRO-3.
            self._mesh.commit(own[name], value, self._plan.at_rest(name).spec)
        self._gradients.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a step reads and writes, by name: parameters and states."""
        parameters = {f"parameter/{self._names[p]}": p for p in self._trainable()}
        return parameters | self.named_states()

    def host_numbers(self) -> list[torch.Tensor]:
        """What `Boundary` takes as numbers, on the CPU; once a step, see `group_numbers`."""
        numbers = group_numbers(self._rules, self.param_groups, self.hold)
        return numbers if self.scaler is None else [*numbers, scale_numbers(self.scaler)]

    def boundary(self) -> Boundary:
        """The step as a function, for the groups and states as they are."""
        trained = set(self._trainable())
        groups = [[p for p in group["params"] if p in trained] for group in self.param_groups]
        shapes = tuple(tuple((id(p), *self.state[p]) for p in group) for group in groups)
        key = shapes, tuple(self.reset_at.items())
        if key not in self._boundaries:
            numbers = number_keys(self._rules, self.param_groups)
            self._boundaries[key] = Boundary(
                groups=tuple(
                    MemberGroup(rule=rule, members=tuple(map(self._member, group)), numbers=names)
                    for rule, group, names in zip(self._rules, groups, numbers, strict=True)
                ),
                mesh=self._mesh,
                clip=self._clip,
                skips=self._precision.skip_nonfinite,
                scaled=self.scaler is not None,
            )
        return self._boundaries[key]

    def _master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A master with the parameter's own digits."""
        name = self._names[parameter]
        now, to = (self._plan.at_rest(f"{role}/{name}") for role in (Role.PARAMETER, Role.MASTER))
        return relaid(self._mesh, parameter.detach().float(), now=now, to=to)

    def _member(self, parameter: nn.Parameter) -> Member:
        return Member(
            name=(name := self._names[parameter]),
            dtype=parameter.dtype,
            slots=tuple(self.state[parameter]),
            reset_at=self.reset_at.get(name, 0),
            layout=self._plan.at_rest(f"gradient/{name}"),
            at_rest=self._plan.at_rest(f"parameter/{name}"),
            on_host=tuple(
                s for s in self.state[parameter] if self._plan.at_rest(f"{s}/{name}").on_host
            ),
        )

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
            master, name = self.state[parameter].get("master"), self._names[parameter]
            self._mesh.mark(parameter, self._plan.at_rest(f"parameter/{name}").spec)
            if master is not None:
                spec = self._plan.at_rest(f"master/{name}").spec
                self._mesh.commit(master, self._master_of(parameter), spec)

    @torch.no_grad()
    def follow_writes(self, written: Collection[str]) -> None:
        """Has the masters of parameters that a forward wrote follow, see `master_of_written`."""
        for parameter in self._trainable():
            name, master = self._names[parameter], self.state[parameter].get("master")
            if name in written and master is not None:
                layout = self._plan.at_rest(f"master/{name}")
                new = master_of_written(self._mesh, parameter, master, layout)
                self._mesh.commit(master, new, layout.spec)

    def refresh_fp32_params(self) -> None:
        """Makes the masters those of the parameters as they are: after writing into these."""
        self.refresh_masters()

    @property
    def clip_grad(self) -> float:
        """The config's `gradient_clipping`, a constant of the compiled step."""
        return self._clip

    @property
    def _global_grad_norm(self) -> float:
        # DeepSpeed's, 0.0 before the first step; reads one scalar.
        return 0.0 if self.grad_norm is None else self.grad_norm.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._gradients.forget(self._names)
