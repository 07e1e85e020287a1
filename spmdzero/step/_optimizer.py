"""The optimizer that updates shards: masters, moments and the gather of parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.backend import relaid, stored_zeros
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.plan import Role
from spmdzero.precision import LossScaler, PrecisionPolicy
from spmdzero.step._autograd import autograd_grad
from spmdzero.step._boundary import Boundary, MemberGroup
from spmdzero.step._deepspeed_names import NamedAsDeepSpeeds
from spmdzero.step._folds import Folds
from spmdzero.step._gradients import GradientStore
from spmdzero.step._numbers import group_numbers, number_keys, scale_numbers
from spmdzero.step._schedule_hold import ScheduleHold
from spmdzero.step._state import State
from spmdzero.step._state_dict import WholeStates
from spmdzero.step._torch_calls import (
    loaded_between_hooks,
    refuse_closure,
    saved_between_hooks,
)
from spmdzero.step._update import Member, master_of_written


class ZeroOptimizer(NamedAsDeepSpeeds):
    """A torch optimizer whose states are shards on the mesh.

    `param_groups` work as in torch, so any `torch.optim.lr_scheduler` can drive it; numbers of a
    group reach the device as data and never recompile. `state[p]` holds the optimizer's slots
    and, where the parameter is not fp32, its ``"master"``, as global tensors that live sharded.
    What is cleared of it starts anew with the next step, as torch's does; masters stay.

    Args:
        param_groups: the groups, their parameters on the device; kept, not copied.
        rules: the update of each group.
        held: the training state, to which it adds masters, slots and counters.
        precision: in which dtype.
        gradients: where `step` finds the summed gradients.
        clip: largest global gradient norm, 0 for none.
        finite: a 0-dim bool on the device that must hold for the step to apply, None if the
            caller has no condition of its own.
        scaler: fp16's loss scale, by which the gradients are too large.

    Attributes:
        reset_at: name of a parameter whose state started anew apart from others' -> the count of
            updates then.
        hold: what holds a schedule back for skipped steps, None without a schedule.
        folds: norm and updates as functions that may be folded.
    """

    _planned = False

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        rules: Sequence[UpdateRule],
        held: State,
        precision: PrecisionPolicy,
        gradients: GradientStore,
        clip: float,
        finite: Callable[[], torch.Tensor | None],
        scaler: LossScaler | None = None,
    ) -> None:
        # torch's own part asks for its `state`.
        self._held, self._slots = held, held.slots
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
        self._rules, self._precision, self._gradients = tuple(rules), precision, gradients
        self._clip, self._finite = clip, finite
        held.upload("counter/applied", torch.zeros((), dtype=torch.float32))
        held.upload("counter/skipped", torch.zeros((), dtype=torch.int32))
        self.scaler = scaler
        self.folds = Folds()
        self.reset_at: dict[str, int] = {}
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        # Their parameters live as long as this optimizer's names of them.
        self._boundaries: dict[Hashable, Boundary] = {}
        self.hold: ScheduleHold | None = None
        for rule, group in zip(rules, param_groups, strict=True):
            for parameter in group["params"]:
                if held.plan[held.names[parameter]].trainable:
                    self._allocate(parameter, rule, group)

        # Plain SGD keeps nothing.
        self._stateful = {p for p, state in self.state.items() if state}

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the latest step, 0-dim fp32 on the device; None before one.

        Unscaled and before clipping; infinity where it was not finite.
        """
        return self._held.get("norm")

    @property
    def skipped_steps(self) -> int:
        """Steps that left the weights alone, for a norm that was not finite; reads one scalar."""
        skipped = int(self._held["counter/skipped"].item())
        if self.hold is not None:
            self.hold.settle(skipped)
        return skipped

    @property
    def gradients_wait(self) -> bool:
        """Whether a backward pass has left gradients that no step has used."""
        return self._gradients.waiting or any(
            autograd_grad(parameter) is not None for parameter in self._held.names
        )

    def forget_skip(self) -> None:
        """Doesn't count the latest skipped step: it raised, and will be done again."""
        self._held.write("counter/skipped", self._held["counter/skipped"] - 1)

    @property
    def can_skip(self) -> bool:
        """Whether a gradient norm that is not finite keeps a step from the weights."""
        return self._precision.skip_nonfinite

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped for a norm that was not finite; reads one scalar."""
        norm = self.grad_norm
        return self.can_skip and norm is not None and norm.item() == math.inf

    def _trainable(self) -> list[nn.Parameter]:
        return self._held.trained(self.param_groups)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Parameter -> its states by slot: one dict as long as the optimizer lives.

        What is assigned to it is put into that dict, by which a captured step finds its tensors.
        """
        return self._slots

    @state.setter
    def state(self, value: dict[torch.Tensor, Any]) -> None:
        if value is not self._slots:
            self._slots.clear()
            self._slots.update(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or a pickle belongs to no training, and has its states alone.
        rest = dict(state)
        self._slots = rest.pop("state")
        super().__setstate__(rest)

    @torch.no_grad()
    def renew(self) -> None:
        """Makes the states that were cleared, or deleted, as they are at the start.

        The count of updates starts anew too, of one parameter or of all.
        """
        missing = {parameter for parameter in self._stateful if not self.state.get(parameter)}
        if not missing:
            return
        counted, applied = len(missing) < len(self._stateful), self._held["counter/applied"]
        now = int(applied.item()) if counted else 0
        if not counted:
            self.reset_at.clear()
            self._held.write("counter/applied", torch.zeros_like(applied))
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            for parameter in group["params"]:
                if parameter in missing:
                    self._allocate(parameter, rule, group)
                    if now and rule.counts:
                        self.reset_at[self._held.names[parameter]] = now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is made.

        Raises:
            SpmdZeroUsageError: afterwards, when the plan has placed all states.
        """
        if self._planned:
            raise SpmdZeroUsageError(
                "optimizer.add_param_group after initialize: the states of its parameters have no "
                "place in the sharding plan. Pass all groups as model_parameters; one that trains "
                'later can start with "lr": 0'
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The states in torch's form, whole and on the CPU, whatever the mesh.

        As torch's, with the fp32 ``"master"`` of a 16-bit parameter among its states, the count
        of updates as each one's ``"step"``, and fp16's scale as ``"loss_scaler"``. On several
        hosts all call it: each gets all of every tensor. Hooks of torch's run before and after.
        """
        return saved_between_hooks(self, lambda: self._whole_states().taken())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Takes over what `state_dict` returned, of this engine or of any mesh, or torch's own.

        Each device gets its part, in the dtype that it keeps. A parameter without a saved state
        starts anew; one without a saved master keeps the one that it has. The numbers of the
        param groups are the saved ones, as in torch. Everything is checked before it changes.
        Hooks of torch's run before and after.

        Raises:
            SpmdZeroUsageError: it is of other param groups or of another optimizer.
        """
        loaded_between_hooks(self, state_dict, lambda given: self._whole_states().take_over(given))

    def _whole_states(self) -> WholeStates:
        self.renew()
        return WholeStates(
            held=self._held,
            groups=self.param_groups,
            rules=self._rules,
            reset_at=self.reset_at,
            scaler=self.scaler,
        )

    def _allocate(self, parameter: nn.Parameter, rule: UpdateRule, group: dict[str, Any]) -> None:
        name, plan, mesh = self._held.names[parameter], self._held.plan, self._held.mesh
        tensor = plan[name]
        state = self.state[parameter]
        if tensor.placement(Role.MASTER) is not None:
            # It has digits that the parameter has not, and is no state in torch.
            if parameter not in self._masters:
                self._masters[parameter] = self._master_of(parameter)
            state["master"] = self._masters[parameter]
        for slot in rule.slots:
            layout, value = plan.at_rest(f"{slot}/{name}"), rule.initial(slot, group)
            zeros = stored_zeros(mesh, layout, self._precision.moment)
            state[slot] = mesh.mark(zeros + value, layout.spec) if value else zeros
        for scalar in rule.scalars:
            value = torch.tensor(rule.initial(scalar, group), dtype=torch.float32)
            state[scalar] = mesh.place(value)

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
            numbers=[self._held.mesh.place(host) for host in self.host_numbers()],
            finite=self._finite(),
            call=self.folds,
        )
        for name, value in new.items():
            # An unmarked parameter drifts to the sharding of its update: to ZeRO-3.
            self._held.write(name, value, known=own.get(name))
        self._gradients.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a step reads and writes, by name: parameters and states."""
        held = self._held
        trained = [(held.names[p], p) for p in self._trainable()]
        parameters = {f"parameter/{name}": parameter for name, parameter in trained}
        states = {
            f"{slot}/{name}": tensor
            for name, parameter in trained
            for slot, tensor in self.state[parameter].items()
        }
        counters = ("counter/applied", "counter/skipped")
        return parameters | states | {name: held[name] for name in counters}

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
                mesh=self._held.mesh,
                clip=self._clip,
                skips=self._precision.skip_nonfinite,
                scaled=self.scaler is not None,
            )
        return self._boundaries[key]

    def _master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A master with the parameter's own digits."""
        held, name = self._held, self._held.names[parameter]
        now, to = (held.plan.at_rest(f"{role}/{name}") for role in (Role.PARAMETER, Role.MASTER))
        return relaid(held.mesh, parameter.detach().float(), now=now, to=to)

    def _member(self, parameter: nn.Parameter) -> Member:
        name, plan = self._held.names[parameter], self._held.plan
        return Member(
            name=name,
            dtype=parameter.dtype,
            slots=tuple(self.state[parameter]),
            reset_at=self.reset_at.get(name, 0),
            layout=plan.at_rest(f"gradient/{name}"),
            at_rest=plan.at_rest(f"parameter/{name}"),
        )

    @torch.no_grad()
    def refresh_masters(self, written: Collection[torch.Tensor] | None = None) -> None:
        """Takes over parameters that were written from outside, as `load_state_dict` does.

        Args:
            written: those parameters, None for all. The masters of others keep the digits that
                a bf16 or fp16 parameter has not.
        """
        held = self._held
        for parameter in self._trainable():
            if written is not None and parameter not in written:
                continue
            master, name = self.state[parameter].get("master"), held.names[parameter]
            held.mesh.mark(parameter, held.plan.at_rest(f"parameter/{name}").spec)
            if master is not None:
                held.write(f"master/{name}", self._master_of(parameter), known=master)

    @torch.no_grad()
    def follow_writes(self, written: Collection[str]) -> None:
        """Has the masters of parameters that a forward wrote follow, see `master_of_written`."""
        for parameter in self._trainable():
            held, name = self._held, self._held.names[parameter]
            master = self.state[parameter].get("master")
            if name in written and master is not None:
                layout = held.plan.at_rest(f"master/{name}")
                new = master_of_written(held.mesh, parameter, master, layout)
                held.write(f"master/{name}", new, known=master)

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
        self._gradients.forget(self._held.names)
