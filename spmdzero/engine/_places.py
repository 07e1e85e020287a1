"""The places of a step's state, which a captured program reads and writes."""

import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from spmdzero.backend import REPLICATED, PartitionSpec, arrays
from spmdzero.state._training import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place where one tensor of the state is kept.

    Attributes:
        name: a name such as ``"exp_avg/body.weight"``.
        holder, key: ``holder[key]`` is the tensor.
        spec: the tensor's sharding.
        rebinds: whether a step puts a new tensor there, instead of a new value into the old one.
    """

    name: str
    holder: MutableMapping[Any, Any]
    key: Any
    spec: PartitionSpec = REPLICATED
    rebinds: bool = False

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is in this place now, or None."""
        return self.holder.get(self.key)


def own_numbers(training: Training) -> None:
    """Gives each 0-dim buffer of the module its own memory on the devices; reads the values.

    Otherwise a buffer made from a Python number shares memory with equal numbers of the program.
    """
    for buffer in training.module.buffers():
        if not buffer.dim():
            arrays.set_value(buffer, training.mesh.place(buffer.detach().cpu()))


def state_places(training: Training) -> dict[str, Place]:
    """Name -> place of each tensor that outlives a micro-batch: parameters, states and so on.

    A tensor that is kept twice, such as a tied weight, is listed once.
    """
    seen: set[int] = set()
    found = {}
    for place in _all(training):
        tensor = place.tensor
        if tensor is None or id(tensor) not in seen:
            seen.add(id(tensor))
            found[place.name] = place
    return found


def _all(training: Training) -> Iterator[Place]:
    def place(name: str, holder: MutableMapping[Any, Any], key: Any) -> Place:
        return Place(name=name, holder=holder, key=key, spec=training.plan.at_rest(name).spec)

    for prefix, part in training.module.named_modules():
        start = f"{prefix}." if prefix else ""
        for role, holder in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield place(f"{role}/{start}{name}", holder, name)
    store, optimizer = training.gradients, training.optimizer
    for name in store.accumulators:
        yield place(f"accumulator/{name}", store.accumulators, name)
    if optimizer is not None:
        for parameter, state in optimizer.state.items():
            for slot in state:
                yield place(f"{slot}/{optimizer._names[parameter]}", state, slot)
        held = vars(optimizer)
        yield Place(name="counter/applied", holder=held, key="_applied")
        yield Place(name="counter/skipped", holder=held, key="_skipped")
        yield Place(name="norm", holder=held, key="grad_norm", rebinds=True)
    health = vars(training.health)
    yield Place(name="first_bad", holder=health, key="_first_bad")
    yield Place(name="finite", holder=health, key="_finite", rebinds=True)
    yield Place(name="loss", holder=health, key="_loss", rebinds=True)
    yield Place(name="total", holder=vars(training), key="total", rebinds=True)
    if training.region is not None:
        for label in training.region.disagreements:
            yield agreement(training, label)


def agreement(training: Training, label: str) -> Place:
    """The place of a flag of the replica region."""
    assert training.region is not None
    flags = training.region.disagreements
    return Place(name=f"agreement/{label}", holder=flags, key=label, rebinds=True)
