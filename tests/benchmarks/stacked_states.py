"""What a step takes of the host and of the devices with fewer, larger optimizer states.

AdamW's update of all shards of a model, compiled and started as a captured step is. "apart" has two
states for each parameter, as spmdzero does; in "stacked" parameters of equal shape have two in
common, so that fewer buffers are handed to a program and back.
"""

import collections
import statistics
from collections.abc import Mapping, Sequence

import torch
from harness.turns import take_turns
from harness.workload import Workload

import spmdzero
from spmdzero.backend.torch_xla import (
    DeviceMesh,
    compile_alone,
    fold,
)
from spmdzero.optim import Adam, LocalTensor, Terms
from spmdzero.plan import MeshSpec, choose_placement

RULE = Adam(decoupled=True, bias_correction=True)


class Shards:
    """The parameters of one stored shape, their gradients, and their states, apart or in stacks."""

    def __init__(self, shape: tuple[int, ...], count: int, mesh: DeviceMesh, *, stacked: bool):
        placement = choose_placement(shape, mesh=mesh.spec, min_shard_elements=1)
        stored, self._stacked = placement.stored_shape(shape, mesh.spec), stacked
        self._mesh, self._spec = mesh, placement.partition_spec(shape, mesh.spec)
        values = [torch.rand(stored, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        self.params, self.grads = (
            [mesh.place(value, self._spec) for _ in range(count)] for value in values
        )
        each = 1 if stacked else count
        form = (count, *stored) if stacked else stored
        self._state_spec = (None, *self._spec) if stacked else self._spec
        self.states = {
            slot: [mesh.place(torch.zeros(form), self._state_spec) for _ in range(each)]
            for slot in RULE.slots
        }

    def update(
        self,
        params: Sequence[torch.Tensor],
        states: Mapping[str, Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        factors: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """What a step makes of `written`."""
        held = {slot: own[0].unbind() if self._stacked else own for slot, own in states.items()}
        new: dict[str, list[torch.Tensor]] = {slot: [] for slot in held}
        values = []
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            state = {slot: own[index] for slot, own in held.items()}
            terms = Terms(factors=factors, whole=LocalTensor(shape=tuple(param.shape)))
            value, changed = RULE.update(param, grad, state, terms)
            values.append(self._mesh.mark(value, self._spec))
            for slot in held:
                new[slot].append(changed[slot])
        for own in new.values():
            stacked = [torch.stack(own)] if self._stacked else own
            values += [self._mesh.mark(value, self._state_spec) for value in stacked]
        return values

    def written(self) -> list[torch.Tensor]:
        """What a step writes."""
        return [*self.params, *(state for states in self.states.values() for state in states)]


class Update:
    """The update of all parameters as a program that was captured."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh, *, stacked: bool):
        counts = collections.Counter(shapes).items()
        parts = [Shards(shape, count, mesh, stacked=stacked) for shape, count in counts]
        self.params = [param for part in parts for param in part.params]
        self.roots = [tensor for part in parts for tensor in part.written()]
        hyper = {
            name: mesh.place(torch.tensor(value))
            for name, value in RULE.hyper(RULE.defaults).items()
        }
        grads = [grad for part in parts for grad in part.grads]
        self._sources = [*self.roots, *grads, mesh.place(torch.tensor(1.0)), *hyper.values()]

        def update(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            given = iter(tensors)
            held = [
                (
                    [next(given) for _ in part.params],
                    {slot: [next(given) for _ in own] for slot, own in part.states.items()},
                )
                for part in parts
            ]
            grads = [[next(given) for _ in part.grads] for part in parts]
            step = next(given)
            factors = RULE.prepare(dict(zip(hyper, given, strict=True)), step)
            return [
                value
                for part, own, theirs in zip(parts, held, grads, strict=True)
                for value in part.update(*own, theirs, factors)
            ]

        donated = {place: place for place in range(len(self.roots))}
        folded = fold(update, self._sources)
        self._program = compile_alone(folded, self._sources, donated=donated, state=len(self.roots))
        self.run()

    def run(self) -> None:
        """Starts the next step."""
        self._program.run(self._sources, self.roots)


def measure(model: str, devices: int, steps: int) -> dict[str, dict[str, float]]:
    """Of each way milliseconds of the host and of the whole step, and how many tensors it writes.

    "sum" is the sum of the absolute weights afterwards, the same in both.
    """
    spmdzero.init_distributed()
    mesh = DeviceMesh(MeshSpec((("fsdp", devices),)))
    built = Workload(model=model, devices=devices, steps=steps).build_on_meta()
    shapes = [tuple(parameter.shape) for parameter in built.parameters()]
    updates = {
        name: Update(shapes, mesh, stacked=name == "stacked") for name in ("apart", "stacked")
    }
    ways = {name: lambda _, update=update: update.run for name, update in updates.items()}
    taken = take_turns(ways, turns=steps, warm_up=3)
    return {
        name: {
            "host": 1e3 * statistics.median(taken[name].host),
            "step": 1e3 * statistics.median(taken[name].whole),
            "tensors": len(update.roots),
            "sum": sum(param.abs().sum().item() for param in update.params),
        }
        for name, update in updates.items()
    }
