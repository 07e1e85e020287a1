"""The optimizer that updates shards: masters, moments and the gather of parameters."""

import inspect
import math
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.backend import relaid, resting, stored_zeros
from spmdzero.backend.pure import Folds
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim import UpdateRule
from spmdzero.plan import Role
from spmdzero.precision import LossScaler, PrecisionPolicy, dtype_named
from spmdzero.step._boundary import Boundary, MemberGroup
from spmdzero.step._client_states import Count, States
from spmdzero.step._gradients import GradientStore, autograd_grad
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


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose states are shards on the mesh.

    `param_groups` work as in torch, so any `torch.optim.lr_scheduler` can drive it; numbers of a
    group reach the device as data and never recompile. `state[p]` holds the optimizer's slots and,
    if the parameter is not fp32, its ``"master"``, as global tensors that live sharded, and the
    count of its updates as ``"step"``. Cleared states start anew with the next step, as in torch;
    masters stay.

    Args:
        param_groups: the groups with parameters on the device; they are kept, not copied.
        rules: the update rule of each group.
        held: the training state, to which it adds masters, slots and counters.
        precision: the dtypes of states.
        gradients: holds the summed gradients for `step`.
        clip: largest global gradient norm, 0 for no clipping.
        finite: returns a 0-dim bool on the device that must hold for the step to apply, or None for
            no such condition.
        scaler: fp16's loss scale, which is a factor of the gradients.

    Attributes:
        reset_at: name of a parameter whose state alone started anew -> the count of updates at that
            time.
        hold: holds a schedule back for skipped steps, None without a schedule.
        folds: calls the norm and the updates, folded or not.
        scaler: the rules of fp16's loss scale, None without one.
        given: the optimizer that was passed to `initialize`, None for the config's.
        configured: the type of the config's optimizer, such as ``"AdamW"``, None for a passed one.
    """

    given: torch.optim.Optimizer | None = None
    configured: str | None = None
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
        self.reset_at: dict[str, int] = {}
        # torch's constructor uses `state`.
        self._held, self._slots = held, held.slots
        self._counts: dict[torch.Tensor, Count] = {}
        self._states: MutableMapping[torch.Tensor, Any] = States(self._slots, self._counts)
        # DeepSpeed's Muon, the optimizer of two rules, has no defaults either.
        super().__init__(param_groups, dict(rules[0].defaults) if len(set(rules)) == 1 else {})
        self._planned = True
        # torch copies the dicts, but a schedule bound to the user's optimizer must reach these
        # groups.
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
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        # The ids in a form stay valid, as `held` keeps the parameters alive.
        self._boundaries: dict[Hashable, Boundary] = {}
        self._whole: Hashable = None
        self.hold: ScheduleHold | None = None
        for rule, group in zip(rules, param_groups, strict=True):
            for parameter in group["params"]:
                if held.plan[held.names[parameter]].trainable:
                    self._allocate(parameter, rule, group)

        # Plain SGD keeps no state.
        self._stateful = {p for p, state in self._slots.items() if state}

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global gradient norm of the latest step, 0-dim fp32 on the device, or None.

        It is unscaled and before clipping, and infinity if it was not finite.
        """
        return self._held.get("norm")

    @property
    def skipped_steps(self) -> int:
        """Number of steps that a non-finite norm kept from the weights; reads one scalar."""
        skipped = int(self._held["counter/skipped"].item())
        if self.hold is not None:
            self.hold.settle(skipped)
        return skipped

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before backward; 1.0 except in fp16."""
        return self.scaler.used if self.scaler else 1.0

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.scaler_to_set().cur_scale = value

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.scaler is not None and self.scaler.dynamic

    def scaler_to_set(self) -> LossScaler:
        """The rules of the loss scale.

        Raises:
            SpmdZeroUsageError: without fp16, as only fp16 has a loss scale.
        """
        if self.scaler is None:
            raise SpmdZeroUsageError("only fp16 has a loss scale, this run has none to set")
        return self.scaler

    @property
    def gradients_wait(self) -> bool:
        """Whether there are gradients that no step has used yet."""
        return self._gradients.waiting or any(
            autograd_grad(parameter) is not None for parameter in self._held.names
        )

    def forget_skip(self) -> None:
        """Takes the latest skipped step from the count: it raised, and will be repeated."""
        self._held.write("counter/skipped", self._held["counter/skipped"] - 1)

    @property
    def can_skip(self) -> bool:
        """Whether a non-finite gradient norm keeps a step from the weights."""
        return self._precision.skip_nonfinite

    @property
    def overflow(self) -> bool:
        """Whether a non-finite norm skipped the latest step; reads one scalar."""
        norm = self.grad_norm
        return self.can_skip and norm is not None and norm.item() == math.inf

    def _trainable(self) -> list[nn.Parameter]:
        return self._held.trained(self.param_groups)

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        """Parameter -> its states: the same mapping for the optimizer's whole life.

        An assigned dict is copied into it, in which a captured step finds its tensors.
        """
        return self._states

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if value is not self._states:
            given = dict(value)
            self._states.clear()
            self._states.update(given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or a pickle belongs to no training, and has only its states.
        rest = dict(state)
        self._states = rest.pop("state")
        super().__setstate__(rest)

    @torch.no_grad()
    def renew(self) -> None:
        """Makes cleared or deleted states again, as at the start.

        The count of updates starts anew too, for one parameter or for all.
        """
        if self._form() == self._whole:
            return
        missing = {parameter for parameter in self._stateful if not self._slots.get(parameter)}
        if not missing:
            self._whole = self._form()
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
        """Adds a group while the optimizer is constructed.

        Raises:
            SpmdZeroUsageError: after the construction, when the plan has placed all states.
        """
        if self._planned:
            raise SpmdZeroUsageError(
                "optimizer.add_param_group after initialize: the states of its parameters have no "
                "place in the sharding plan. Pass all groups as model_parameters; one that trains "
                'later can start with "lr": 0'
            )
        # torch hides it from torch.compile, for which the first call imports that, for a second.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """The states in torch's form, whole and on the CPU, whatever the mesh.

        It is like torch's, with the fp32 ``"master"`` of a 16-bit parameter among its states, the
        count of updates as each parameter's ``"step"``, and fp16's scale as ``"loss_scaler"``. All
        of several hosts call it, and each gets whole tensors. Torch's hooks run before and after.
        """
        return saved_between_hooks(self, lambda: self._whole_states().taken())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Loads a result of `state_dict`, of this engine or of any mesh, or a state dict of torch.

        Each device gets its part, in the dtype that it keeps. A parameter without a saved state
        starts anew; a parameter without a saved master keeps its master. The numbers of the param
        groups are the saved ones, as in torch. Everything is checked before anything changes.
        Torch's hooks run before and after.

        Raises:
            SpmdZeroUsageError: the state dict has different param groups or a different optimizer.
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
        state = self._slots[parameter]
        if rule.counts:
            self._counts[parameter] = Count(self._held, name, self.reset_at)
        if tensor.placement(Role.MASTER) is not None:
            # A master has more digits than the parameter, and is no state in torch, so it stays.
            if parameter not in self._masters:
                layout = plan.at_rest(f"{Role.MASTER}/{name}")
                self._masters[parameter] = resting(mesh, self._master_of(parameter), layout)
            state["master"] = self._masters[parameter]
        for slot, dtype in plan.slots(tensor).items():
            layout = plan.at_rest(f"{slot}/{name}")
            value = rule.initial(slot, group)
            zeros = stored_zeros(mesh, layout, dtype_named(dtype))
            made = mesh.lay(zeros + value, layout) if value else zeros
            state[slot] = resting(mesh, made, layout)
        for scalar in rule.scalars:
            value = torch.tensor(rule.initial(scalar, group), dtype=torch.float32)
            state[scalar] = mesh.place(value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Runs norm, clipping, update and gather as one pending program; reads nothing."""
        refuse_closure(closure)
        self.renew()
        self._gradients.reduce_deferred()
        own, boundary = self.tensors(), self.boundary()
        new = boundary(
            own,
            gradients={name: self._gradients.take(name) for name in boundary.names},
            numbers=self._held.mesh.place_all(self.host_numbers()),
            finite=self._finite(),
            call=self.folds,
        )
        for name, value in new.items():
            # An unmarked parameter would drift to the sharding of its update: to ZeRO-3.
            self._held.write(name, value, known=own.get(name))
        self._gradients.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of the parameters and states that a step reads and writes."""
        held = self._held
        trained = [(held.names[p], p) for p in self._trainable()]
        parameters = {f"parameter/{name}": parameter for name, parameter in trained}
        states = {
            f"{slot}/{name}": tensor
            for name, parameter in trained
            for slot, tensor in self._slots[parameter].items()
        }
        counters = ("counter/applied", "counter/skipped")
        return parameters | states | {name: held[name] for name in counters}

    def host_numbers(self) -> list[torch.Tensor]:
        """The numbers for `Boundary`, on the CPU; called once a step, see `group_numbers`."""
        numbers = group_numbers(self._rules, self.param_groups, self.hold)
        return numbers if self.scaler is None else [*numbers, scale_numbers(self.scaler)]

    def _form(self) -> tuple[Any, ...]:
        """Returns what `renew` and `boundary` depend on, in a form of little cost a step."""
        groups = tuple([tuple(map(id, group["params"])) for group in self.param_groups])
        slots = tuple(map(id, self._slots)), tuple(map(tuple, self._slots.values()))
        return groups, slots, tuple(self.reset_at.items())

    def boundary(self) -> Boundary:
        """The step as a function, for the present groups and states."""
        form = self._form()
        if form not in self._boundaries:
            self._boundaries[form] = self._boundary()
        return self._boundaries[form]

    def _boundary(self) -> Boundary:
        trained = set(self._trainable())
        groups = [[p for p in group["params"] if p in trained] for group in self.param_groups]
        numbers = number_keys(self._rules, self.param_groups)
        return Boundary(
            groups=tuple(
                MemberGroup(rule=rule, members=tuple(map(self._member, group)), numbers=names)
                for rule, group, names in zip(self._rules, groups, numbers, strict=True)
            ),
            mesh=self._held.mesh,
            clip=self._clip,
            skips=self._precision.skip_nonfinite,
            scaled=self.scaler is not None,
        )

    def _master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A new master with the parameter's values."""
        held, name = self._held, self._held.names[parameter]
        now, to = (held.plan.at_rest(f"{role}/{name}") for role in (Role.PARAMETER, Role.MASTER))
        return relaid(held.mesh, parameter.detach().float(), now=now, to=to)

    def _member(self, parameter: nn.Parameter) -> Member:
        name, plan = self._held.names[parameter], self._held.plan
        slots = tuple(self._slots[parameter])
        return Member(
            name=name,
            dtype=parameter.dtype,
            slots=slots,
            reset_at=self.reset_at.get(name, 0),
            layout=plan.at_rest(f"gradient/{name}"),
            at_rest=plan.at_rest(f"parameter/{name}"),
            layouts=tuple(plan.at_rest(f"{slot}/{name}") for slot in slots),
            eight_bits=plan[name].param.eight_bits,
        )

    @torch.no_grad()
    def refresh_masters(self, written: Collection[torch.Tensor] | None = None) -> None:
        """Sets the masters to parameters that were written from outside, as by `load_state_dict`.

        Args:
            written: the written parameters, None for all. Masters of other parameters keep the
                digits that a bf16 or fp16 parameter doesn't have.
        """
        held = self._held
        for parameter in self._trainable():
            if written is not None and parameter not in written:
                continue
            master, name = self._slots[parameter].get("master"), held.names[parameter]
            held.mesh.lay(parameter, held.plan.at_rest(f"parameter/{name}"))
            if master is not None:
                held.write(f"master/{name}", self._master_of(parameter), known=master)

    @torch.no_grad()
    def follow_writes(self, written: Collection[str]) -> None:
        """Updates the masters of parameters that a forward wrote, see `master_of_written`."""
        for parameter in self._trainable():
            held, name = self._held, self._held.names[parameter]
            master = self._slots[parameter].get("master")
            if name in written and master is not None:
                layout = held.plan.at_rest(f"master/{name}")
                new = master_of_written(held.mesh, parameter, master, layout)
                held.write(f"master/{name}", new, known=master)

    def refresh_fp32_params(self) -> None:
        """Sets all masters to the parameters' present values, after a write into parameters."""
        self.refresh_masters()

    @property
    def clip_grad(self) -> float:
        """The config's `gradient_clipping`, a constant of the compiled step."""
        return self._clip

    @property
    def _global_grad_norm(self) -> float:
        # As in DeepSpeed, 0.0 before the first step; reads one scalar.
        return 0.0 if self.grad_norm is None else self.grad_norm.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients summed so far."""
        self._gradients.forget(self._held.names)
