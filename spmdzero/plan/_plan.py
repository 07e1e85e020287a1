"""The sharding plan of a model."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from spmdzero._display import Shown
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.plan import _json
from spmdzero.plan._blocks import coded_slot, layout_of_scales, scale_slot
from spmdzero.plan._choose import choose_placement
from spmdzero.plan._dtypes import itemsize
from spmdzero.plan._layout import Layout
from spmdzero.plan._memory import MemoryReport, StageComparison, memory_report, paper_formula
from spmdzero.plan._mesh import MeshSpec
from spmdzero.plan._placement import Placement, Shape
from spmdzero.plan._roles import Role, in_use, parameter_at_rest, placements_at_stage
from spmdzero.plan._tensors import ParamSpec, RoleState, TensorPlan

_ROLES = {role.value for role in Role}
_EVERYWHERE = Placement(kind="replicate", reason="every device has all of it")


@dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPlan(Shown):
    """Parameter name -> role -> placement on the mesh, with the reason of each placement.

    `build` makes a plan. Two plans are equal when all their settings and placements are equal.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        mesh: the mesh that the placements refer to.
        min_shard_elements: tensors with fewer elements keep replicated states.
        master: whether parameters whose dtype isn't `master_dtype` have master weights.
        master_dtype: dtype of the master weights.
        moments: the optimizer's slots, e.g. ``("exp_avg", "exp_avg_sq")``, for every parameter
            whose `ParamSpec.moments` is None.
        moment_dtype: dtype of every slot that `slot_dtypes` doesn't have.
        slot_dtypes: (slot, dtype) of those with one of their own; see `slot_dtype`.
        accumulator_dtype: dtype of accumulator and gradient; None means the parameter's dtype.
        accumulation_steps: micro-batches per step; an accumulator exists above 1.
        partial: whether the backward hands over each device's own summand of the gradient.
        on_host: roles that rest in host memory, except for small tensors.
        tensors: the plan of each parameter, in the model's order.
    """

    stage: int
    mesh: MeshSpec
    min_shard_elements: int
    master: bool
    master_dtype: str
    moments: tuple[str, ...]
    moment_dtype: str
    accumulator_dtype: str | None
    accumulation_steps: int
    partial: bool
    tensors: tuple[TensorPlan, ...]
    on_host: tuple[Role, ...] = ()
    slot_dtypes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_at_least(self.min_shard_elements, 0, key="spmd.min_shard_elements")
        _check_at_least(self.accumulation_steps, 1, key="gradient_accumulation_steps")
        if self.stage not in range(4):
            raise SpmdZeroConfigError(
                key="zero_optimization.stage",
                value=self.stage,
                reason="a plan knows the ZeRO stages 0 to 3",
                fix="Use stage 3, which shards everything.",
            )
        itemsize(self.master_dtype)
        for dtype in (self.moment_dtype, *dict(self.slot_dtypes).values()):
            itemsize(dtype)
        if len(self._by_name) != len(self.tensors):
            raise SpmdZeroUsageError("two parameters of a plan have the same name")
        for tensor in self.tensors:
            for state in tensor.states:
                state.placement.partition_spec(tensor.shape, self.mesh)

    @classmethod
    def build(
        cls,
        params: Iterable[ParamSpec],
        *,
        stage: int,
        mesh: MeshSpec,
        min_shard_elements: int = 2048,
        master: bool,
        master_dtype: str = "float32",
        moments: tuple[str, ...],
        moment_dtype: str = "float32",
        accumulator_dtype: str | None,
        accumulation_steps: int,
        partial: bool = True,
        on_host: tuple[Role, ...] = (),
        slot_dtypes: tuple[tuple[str, str], ...] = (),
    ) -> "ShardingPlan":
        """The plan for `params`; the arguments are the attributes of the class.

        Raises:
            SpmdZeroConfigError: a stage other than 0 to 3, or a count that is too small.
            SpmdZeroUsageError: an unknown dtype, or two parameters with the same name.
        """

        def states(param: ParamSpec) -> Iterator[RoleState]:
            shard = choose_placement(
                param.shape,
                mesh=mesh,
                min_shard_elements=min_shard_elements,
                tensor_dim=param.tensor_dim if mesh.tensor > 1 else None,
            )
            if not param.trainable:
                frozen = (
                    parameter_at_rest(stage=stage, shard=shard, persistent=param.persistent)
                    if stage == 3
                    else shard.on_each_replica(reason="frozen: no gradient, no state")
                )
                yield RoleState(role=Role.PARAMETER, placement=frozen, dtype=param.dtype)
                return
            gradient_dtype = accumulator_dtype or param.dtype
            dtypes = {Role.PARAMETER: param.dtype, Role.GRADIENT: gradient_dtype}
            if accumulation_steps > 1:
                dtypes[Role.ACCUMULATOR] = gradient_dtype
            if master and param.dtype != master_dtype:
                dtypes[Role.MASTER] = master_dtype
            if moments if param.moments is None else param.moments:
                dtypes[Role.MOMENT] = moment_dtype
            placements = placements_at_stage(
                stage=stage, shard=shard, partial=partial, persistent=param.persistent
            )
            for role in Role:
                if role in dtypes:
                    yield RoleState(role=role, placement=placements[role], dtype=dtypes[role])

        return cls(
            stage=stage,
            mesh=mesh,
            min_shard_elements=min_shard_elements,
            master=master,
            master_dtype=master_dtype,
            moments=moments,
            moment_dtype=moment_dtype,
            accumulator_dtype=accumulator_dtype,
            accumulation_steps=accumulation_steps,
            partial=partial,
            on_host=on_host,
            slot_dtypes=slot_dtypes,
            tensors=tuple(TensorPlan(param=param, states=tuple(states(param))) for param in params),
        )

    def at_stage(self, stage: int) -> "ShardingPlan":
        """The plan of the same parameters and settings at `stage`."""
        return self._rebuilt(stage=stage)

    def with_accumulation(self, accumulation_steps: int) -> "ShardingPlan":
        """The plan of the same parameters and settings for `accumulation_steps` micro-batches."""
        return self._rebuilt(accumulation_steps=accumulation_steps)

    def with_states_on_host(self) -> "ShardingPlan":
        """The plan of the same parameters with master weights and moments in host memory."""
        return self._rebuilt(on_host=(Role.MASTER, Role.MOMENT))

    def on_mesh(self, mesh: MeshSpec) -> "ShardingPlan":
        """The plan of the same parameters and settings on `mesh`."""
        return self._rebuilt(mesh=mesh)

    def _rebuilt(self, **changed: Any) -> "ShardingPlan":
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}
        return self.build((tensor.param for tensor in self.tensors), **{**known, **changed})

    @cached_property
    def _by_name(self) -> dict[str, TensorPlan]:
        return {tensor.name: tensor for tensor in self.tensors}

    def at_rest(self, state: str) -> Layout:
        """Where a tensor of the training state lives between steps.

        Args:
            state: the tensor's name: ``parameter/<name>``, ``accumulator/<name>``,
                ``gradient/<name>``, ``master/<name>``, or a slot of the optimizer such as
                ``exp_avg/<name>``. A tensor of any other name is whole on every device: buffers,
                counters, flags, and numbers that an optimizer keeps for each parameter.

        Raises:
            SpmdZeroUsageError: the parameter has no such role in this plan.
        """
        return self._layouts(state)[0]

    def in_parts(self, shape: Shape) -> Layout:
        """A layout in which devices share a tensor of `shape` that they hold whole.

        Each reads its part out so, as for a checkpoint. It is whole if the tensor is too small.
        """
        placement = choose_placement(
            shape, mesh=self.mesh, min_shard_elements=self.min_shard_elements
        )
        return Layout(placement=placement, shape=shape, mesh=self.mesh)

    def in_use(self, state: str) -> Layout:
        """The layout in which the step's program computes with a tensor; see `at_rest`."""
        return self._layouts(state)[1]

    def _layouts(self, state: str) -> tuple[Layout, Layout]:
        if state not in self._known:
            role, _, name = state.partition("/")
            tensor = self._by_name.get(name)
            found = None if tensor is None else self._role(role, tensor)
            shapes = {} if tensor is None else dict(tensor.param.shapes)
            if tensor is None or found is None or role in shapes:
                shape = shapes.get(role, ())
                whole = Layout(placement=_EVERYWHERE, shape=shape, mesh=self.mesh)
                self._known[state] = whole, whole
            else:
                placement = tensor.require(found)
                use = Layout(placement=placement, shape=tensor.shape, mesh=self.mesh)
                rest = replace(use, on_host=self.rests_on_host(found, tensor))
                use = replace(use, placement=in_use(found, placement))
                if coded_slot(role) in tensor.param.eight_bits:
                    rest, use = layout_of_scales(rest), layout_of_scales(use)
                self._known[state] = rest, use
        return self._known[state]

    def slot_dtype(self, slot: str) -> str:
        """The dtype in which a slot of the optimizer rests, where it doesn't in 8 bits."""
        return dict(self.slot_dtypes).get(slot, self.moment_dtype)

    def slots(self, tensor: TensorPlan) -> dict[str, str]:
        """Each tensor of the optimizer's state of a parameter -> the dtype in which it rests."""
        if tensor.placement(Role.MOMENT) is None:
            return {}
        return {
            slot: "uint8"
            if slot in tensor.param.eight_bits
            else "float32"
            if coded_slot(slot) in tensor.param.eight_bits
            else self.slot_dtype(slot)
            for slot in tensor.slots(self.moments)
        }

    @cached_property
    def in_eight_bits(self) -> dict[str, Shape]:
        """Name of each state that rests in codes of 8 bits -> the shape of its scales."""
        return {
            f"{slot}/{tensor.name}": self.at_rest(f"{scale_slot(slot)}/{tensor.name}").shape
            for tensor in self.tensors
            if tensor.trainable
            for slot in tensor.param.eight_bits
        }

    def is_slot(self, word: str) -> bool:
        """Whether tensors of a name such as ``exp_avg/...`` are the optimizer's states."""
        return word in self._slot_words

    @cached_property
    def _slot_words(self) -> set[str]:
        return {word for tensor in self.tensors for word in tensor.slots(self.moments)}

    def rests_on_host(self, role: Role, tensor: TensorPlan) -> bool:
        """Whether a role of a parameter rests in host memory; a small tensor isn't worth a copy."""
        small = math.prod(tensor.shape) < self.min_shard_elements
        if role is Role.PARAMETER and not tensor.require(role).over_fsdp:
            # Each use reads a tensor that every device holds whole, and no use gathers it.
            return False
        return role in self.on_host and not small

    def _slots_of(self, tensor: TensorPlan) -> list[tuple[Layout, str]]:
        slots = self.slots(tensor).items()
        return [(self.at_rest(f"{slot}/{tensor.name}"), dtype) for slot, dtype in slots]

    def _role(self, word: str, tensor: TensorPlan) -> Role | None:
        if word in tensor.slots(self.moments):
            return Role.MOMENT
        return Role(word) if word in _ROLES else None

    @cached_property
    def _known(self) -> dict[str, tuple[Layout, Layout]]:
        # The layouts are asked for at each step.
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the model's order."""
        return tuple(tensor.name for tensor in self.tensors)

    def __getitem__(self, name: str) -> TensorPlan:
        return self._by_name[name]

    def __iter__(self) -> Iterator[TensorPlan]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def memory(self) -> MemoryReport:
        """Bytes per device of each role, padding included."""
        return memory_report(
            self.tensors, self.mesh, slots=self._slots_of, on_host=self.rests_on_host
        )

    def compare(self) -> StageComparison:
        """Bytes per device at the stages 0 to 3, beside the ZeRO paper's formula."""
        stages = tuple(self.at_stage(stage).memory() for stage in range(4))
        paper, note = paper_formula(self.tensors, self.mesh, slots=self._slots_of)
        return StageComparison(stages=stages, paper=paper, paper_note=note)

    def to_json(self) -> str:
        """The plan as JSON text that `from_json` reads."""
        return _json.dump(self)

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """The plan that `to_json` wrote, with the stored placements.

        Raises:
            SpmdZeroError: the text is not JSON, has a different version, or is not a valid plan.
        """
        return _json.load(cls, text)

    def __repr__(self) -> str:
        return f"ShardingPlan(stage={self.stage}, mesh=[{self.mesh}], {len(self)} tensors)"


def _check_at_least(value: int, least: int, *, key: str) -> None:
    if value < least:
        raise SpmdZeroConfigError(
            key=key, value=value, reason=f"it is below {least}", fix=f"Use {least} or more."
        )
