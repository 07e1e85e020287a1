"""Where a step's state is kept: what a captured program reads and writes."""

import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from spmdzero.backend.torch_xla import set_value
from spmdzero.state._training import Training

# The state that the user's own code may have made.
_USERS = ("buffer/", "attribute/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """One tensor of the state, by where it is kept rather than by what it is now.

    Attributes:
        name: such as ``"exp_avg/body.weight"``.
        holder, key: ``holder[key]`` is the tensor.
    """

    name: str
    holder: MutableMapping[Any, Any]
    key: Any

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        return self.holder.get(self.key)


def state_places(training: Training) -> list[Place]:
    """Parameters, buffers, states, accumulators and everything else that outlives a micro-batch.

    A tensor that is kept twice, such as a tied weight, is listed once.
    """
    seen: set[int] = set()
    found = []
    for place in _all(training):
        tensor = place.tensor
        if tensor is None or id(tensor) not in seen:
            seen.add(id(tensor))
            found.append(place)
    return found


def own_numbers(training: Training) -> None:
    """Gives each 0-dim buffer and attribute of the module a buffer of its own; reads them.

    One that was made of a Python number shares that of equal numbers in the program.
    """
    for place in _all(training):
        tensor = place.tensor
        if place.name.startswith(_USERS) and tensor is not None and not tensor.dim():
            set_value(tensor, training.mesh.place(tensor.detach().cpu()))


def _all(training: Training) -> Iterator[Place]:
    for prefix, part in training.module.named_modules():
        for role, holder in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name in holder:
                yield Place(name=f"{role}/{prefix}.{name}", holder=holder, key=name)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.device.type == "xla":
                yield Place(name=f"attribute/{prefix}.{name}", holder=vars(part), key=name)
    accumulators = training.gradients.accumulators
    for name in accumulators:
        yield Place(name=f"accumulator/{name}", holder=accumulators, key=name)
    optimizer = training.optimizer
    if optimizer is not None:
        names = optimizer._names
        for parameter, state in optimizer.state.items():
            for slot in state:
                yield Place(name=f"{slot}/{names[parameter]}", holder=state, key=slot)
        for attribute in ("_applied", "_skipped", "grad_norm"):
            yield Place(name=attribute, holder=vars(optimizer), key=attribute)
    for attribute in ("_first_bad", "_finite", "_loss"):
        yield Place(name=attribute, holder=vars(training.health), key=attribute)
    yield Place(name="total", holder=vars(training), key="total")
    if training.region is not None:
        yield Place(name="replicas", holder=vars(training.region), key="replicas")
        flags = training.region.disagreements
        for label in flags:
            yield Place(name=f"agreement/{label}", holder=flags, key=label)
