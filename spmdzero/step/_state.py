"""The training state: reads and writes each tensor that outlives a micro-batch, by name."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend import INDICES, Mesh, PartitionSpec
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import ShardingPlan

# Names of tensors that a step replaces by new tensors; it writes into all others.
_REPLACED = frozenset({"norm", "finite", "loss"})
_NUMBERS = _REPLACED | {"counter/applied", "counter/skipped", "first_bad", "outside"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place where one tensor of the state is kept.

    Attributes:
        name: a name such as ``"exp_avg/body.weight"``.
        registry, key: ``registry[key]`` is the tensor.
        spec: the tensor's sharding between steps, by the plan.
        replaced: whether a step puts a new tensor there, instead of a new value into the old one.
    """

    name: str
    registry: MutableMapping[Any, Any]
    key: Any
    spec: PartitionSpec
    replaced: bool

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is in this place now, or None."""
        return self.registry.get(self.key)


def tensors_in(places: Iterable[Place]) -> list[torch.Tensor | None]:
    """The `tensor` of each place; a step asks for hundreds."""
    return [place.registry.get(place.key) for place in places]


class State(Mapping[str, torch.Tensor]):
    """Name -> tensor of the training state; each device holds the part that the plan gives it.

    docs/design.md has a table of the names, of the registries that keep the tensors, and of the
    parts that fill them.

    A tensor that is kept twice, such as a tied weight, has its first name only.

    Args:
        module: a module with parameters on the devices.
        plan, mesh: where each tensor lives.

    Attributes:
        parameters: name -> planned parameter. The module's registries may hold other parameters by
            now.
        names: planned parameter -> its name.
        slots: parameter -> its states by slot.
        accumulators: parameter name -> the gradients summed so far.
        numbers: whole name -> 0-dim tensor.
        flags: label -> whether replicas differed.
    """

    def __init__(self, module: nn.Module, *, plan: ShardingPlan, mesh: Mesh) -> None:
        self.module, self.plan, self.mesh = module, plan, mesh
        self.parameters = dict(module.named_parameters())
        self.names: dict[torch.Tensor, str] = {p: name for name, p in self.parameters.items()}
        self.slots: defaultdict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        self.accumulators: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, torch.Tensor] = {}
        self.flags: dict[str, torch.Tensor] = {}

    def place(self, name: str) -> Place:
        """The place of the tensor named `name`, even if there is no tensor yet.

        Raises:
            KeyError: there is no such parameter or submodule.
        """
        role, _, own = name.partition("/")
        if name in _NUMBERS:
            return self._place(name, self.numbers, name)
        if role in ("parameter", "buffer"):
            prefix, _, key = own.rpartition(".")
            try:
                part = self.module.get_submodule(prefix)
            except AttributeError as error:
                raise KeyError(name) from error
            return self._place(name, _registry(part, role), key)
        if role == "accumulator":
            return self._place(name, self.accumulators, own)
        if role == "agreement":
            return self._place(name, self.flags, own)
        return self._place(name, self.slots.get(self.parameters[own], {}), role)

    def _place(self, name: str, registry: MutableMapping[Any, Any], key: Any) -> Place:
        replaced = name in _REPLACED or registry is self.flags
        # Each device keeps its own flag of indices.
        split = registry is self.flags and key == INDICES
        spec = self.mesh.batch_spec(2) if split else self.plan.at_rest(name).spec
        return Place(name=name, registry=registry, key=key, spec=spec, replaced=replaced)

    def places(self) -> Iterator[Place]:
        """Yields the place of each existing tensor, with the module's present parameters."""
        for role in ("parameter", "buffer"):
            yield from self._modules_own(role)
        for name in self.accumulators:
            yield self._place(f"accumulator/{name}", self.accumulators, name)
        for name, parameter in self.parameters.items():
            registry = self.slots.get(parameter, {})
            for slot in registry:
                yield self._place(f"{slot}/{name}", registry, slot)
        for name in self.numbers:
            yield self._place(name, self.numbers, name)
        for label in self.flags:
            yield self._place(f"agreement/{label}", self.flags, label)

    def _modules_own(self, role: str) -> Iterator[Place]:
        seen: set[torch.Tensor] = set()
        for prefix, part in self.module.named_modules():
            start = f"{prefix}." if prefix else ""
            registry = _registry(part, role)
            for key, tensor in registry.items():
                if tensor is not None and tensor not in seen:
                    seen.add(tensor)
                    yield self._place(f"{role}/{start}{key}", registry, key)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.place(name).tensor
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (place.name for place in self.places())

    def __len__(self) -> int:
        return sum(1 for _ in self.places())

    def write(self, name: str, value: torch.Tensor, *, known: torch.Tensor | None = None) -> None:
        """Sets the tensor named `name` to `value`, annotated by the plan.

        Args:
            name: the tensor's name.
            value: the new value.
            known: the present tensor, if the caller has it.

        Raises:
            KeyError: no tensor has that name, and a step replaces none of that name.
        """
        place = self.place(name) if known is None else None
        if place is not None and place.replaced:
            place.registry[place.key] = self.mesh.mark(value, place.spec)
            return
        old = self[name] if known is None else known
        self.mesh.commit(old, value, self.plan.at_rest(name).spec)

    def upload(self, name: str, number: torch.Tensor) -> None:
        """Uploads a 0-dim number of the host as the tensor named `name`."""
        place = self.place(name)
        place.registry[place.key] = self.mesh.place(number)

    def trained(self, groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
        """The parameters of these param groups that the plan trains.

        Raises:
            SpmdZeroUsageError: a parameter was not planned.
        """
        members = [parameter for group in groups for parameter in group["params"]]
        for parameter in members:
            if parameter not in self.names:
                raise SpmdZeroUsageError(
                    f"a param group holds a tensor of shape {list(parameter.shape)} that "
                    "initialize was not given: its states have no place in the sharding plan. Pass "
                    "all parameters as model_parameters"
                )
        # The plan decides, not requires_grad, which may change after states were allocated.
        return [p for p in members if self.plan[self.names[p]].trainable]


def _registry(part: nn.Module, role: str) -> MutableMapping[str, Any]:
    return part._parameters if role == "parameter" else part._buffers
