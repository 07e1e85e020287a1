"""A torch optimizer of any class whose update is elementwise, run on shards."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.optim._group_checks import refuse_options, refuse_tensors
from spmdzero.optim._initial_state import initial_state, refuse
from spmdzero.optim._rule import LocalTensor, Named, Terms, Updated, UpdateRule
from spmdzero.optim._substituted import PUT_ON, stand_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 3


class _Same:
    """Wraps an object that it keeps alive; equal to other wrappers of the same object."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)


def attributes_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """The attributes that an optimizer's class, or a subclass, has set on it.

    Plain values, containers and the attributes of objects are compared by value, three levels
    deep; all others by identity, and tensors also by their version.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in _torchs()}
    return _frozen(own, _DEPTH)


@functools.cache
def _torchs() -> frozenset[str]:
    """torch's own attributes, and the methods that are put on an optimizer.

    Computed at the first call, not at import: torch's first optimizer imports its compiler, which
    takes 2 s of a core.
    """
    return frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), *PUT_ON})


def _frozen(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _Same(value), value._version
    if depth and isinstance(value, Mapping):
        items = [(_frozen(key, 0), _frozen(item, depth - 1)) for key, item in value.items()]
        return type(value), tuple(items)
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple([_frozen(item, depth - 1) for item in value])
    held = getattr(value, "__dict__", None)
    if depth and held and not isinstance(value, type | nn.Module):
        return _Same(value), _frozen(held, depth - 1)
    return _Same(value)


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchElementwise(UpdateRule):
    """Runs a class's own `step` on a shard of a parameter, its gradient and its state.

    This is sound for a class that treats each element by itself, as `proven` finds out. Each update
    works on a copy of the optimizer, whose one parameter and state stand in for the shards.
    Counters that the class keeps as numbers become 0-dim tensors, so that a skipped step doesn't
    count and no step compiles anew. The group's hyperparameters stay Python numbers, which
    torch_xla uploads as data; only one that becomes exactly 0 or 1 compiles again.

    Attributes:
        optimizer: the user's; only its class and its attributes are used.
        group: its param group, read at every update.
        slot_values: slot -> the initial value of its elements.
        scalar_values: scalar -> its initial value.
        capturable: torch's switch of that name, where the class has it.
    """

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    slot_values: Mapping[str, float]
    scalar_values: Mapping[str, float]
    capturable: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """The state tensors of the parameter's shape that the class keeps."""
        return tuple(self.slot_values)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The counters and other single numbers that the class keeps for a parameter."""
        return tuple(self.scalar_values)

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """The class's initial value of `name`, at the lr that the optimizer was given."""
        return {**self.slot_values, **self.scalar_values}[name]

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the class."""
        return dict(self.optimizer.defaults)

    def validate(self, group: Mapping[str, Any]) -> None:
        """Checks a param group; the class itself checks ranges.

        Raises:
            SpmdZeroConfigError: a hyperparameter is a tensor, or the step is differentiable.
        """
        refuse_tensors(group)
        refuse_options(group, ("differentiable",))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Empty, because the class reads its group itself."""
        return {}

    def attributes(self) -> Hashable:
        """The optimizer's own attributes, which its step may read."""
        return attributes_of(self.optimizer)

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step.

        Raises:
            SpmdZeroUsageError: the class keeps different state than when it was proven.
        """
        held: dict[str, Any] = {name: value * 1 for name, value in state.items()}
        copied, parameter = stand_in(
            self.optimizer, self.group, held, param, grad, capturable=self.capturable
        )
        try:
            copied.step()
        except KeyError as error:
            raise self._changed(f"misses {error}") from error
        after = {name: value for name, value in held.items() if value is not None}
        if after.keys() != state.keys():
            raise self._changed(f"keeps {sorted(after)}, not {sorted(state)}")
        new = {name: torch.as_tensor(value, device=param.device) for name, value in after.items()}
        kept = {name: terms.keep(value.to(param.dtype), state[name]) for name, value in new.items()}
        return parameter.detach(), kept

    def _changed(self, how: str) -> SpmdZeroUsageError:
        return SpmdZeroUsageError(
            f"{type(self.optimizer).__name__} now has other state than when it was handed to "
            f"initialize: it {how}. Don't change the kind of a param group while training, such "
            "as momentum from 0"
        )


_STEPS = 3
_SHAPES = ((16, 12), (7,), (4, 3, 3, 3))
_LR = 0.05
ELEMENTS_MEET = "elements of a parameter change each other's update, or its shape does"


def on_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, capturable: bool
) -> TorchElementwise:
    """The rule for a class whose states start from one number each; it isn't proven yet.

    Raises:
        SpmdZeroConfigError: the class keeps other state.
    """
    slots, scalars = initial_state(optimizer, group)
    return TorchElementwise(
        optimizer=optimizer,
        group=group,
        slot_values=slots,
        scalar_values=scalars,
        capturable=capturable,
    )


def proven(
    make: Callable[[Mapping[str, Any]], TorchElementwise],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    device: torch.device,
) -> TorchElementwise:
    """The rule that `make` makes of a group, proven on small tensors.

    The proof compares a few steps of the class itself over whole tensors on the CPU with steps of
    the rule over the same elements on `device`, shuffled, cut into pieces of other shapes and
    padded with zeros. They must agree, and the rule must read nothing back from the device.

    Raises:
        SpmdZeroConfigError: they don't agree, or the class can't be run so.
    """
    # A schedule may have set lr to 0, with which all classes agree.
    numbers = {**group, "lr": _LR} if "lr" in group else dict(group)
    whole = [_random(shape, seed=i) for i, shape in enumerate(_SHAPES)]
    grads = [
        [_random(p.shape, seed=100 * step + i) * 10.0 ** (i - 1) for i, p in enumerate(whole)]
        for step in range(1, _STEPS + 1)
    ]
    with _failures_of(optimizer):
        rule = make(numbers)
        expected = _class_itself(optimizer, numbers, whole, grads)
        with _NoHostReads(device):
            pending = _rule_on_pieces(rule, whole, grads, device)
        found = pending()
        # Find the state again at the group's own lr, from which some classes start their state.
        rule = make(group)
    change = expected - torch.cat([p.flatten() for p in whole])
    # fp32 rounds that much; an update that depends on other elements is off by a share of it.
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(change.abs().max())):
        refuse(optimizer, ELEMENTS_MEET)
    return rule


def _class_itself(
    optimizer: torch.optim.Optimizer,
    numbers: Mapping[str, Any],
    whole: list[Tensor],
    grads: list[list[Tensor]],
) -> Tensor:
    """All elements after the class's own steps, with all parameters in one group."""
    parameters = [nn.Parameter(p.clone()) for p in whole]
    copied, _ = stand_in(optimizer, numbers, {}, whole[0], whole[0])
    copied.param_groups = [{**copied.param_groups[0], "params": parameters}]
    copied.state.clear()
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        copied.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def _rule_on_pieces(
    rule: TorchElementwise, whole: list[Tensor], grads: list[list[Tensor]], device: torch.device
) -> Callable[[], Tensor]:
    """A function that returns the same elements after the rule's steps."""
    flat = torch.cat([p.flatten() for p in whole])
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(7))
    cuts = [0, 5, 100, flat.numel()]
    places = [order[a:b] for a, b in itertools.pairwise(cuts)]

    def pieces(values: Tensor) -> list[Tensor]:
        found = [torch.cat([values[place], values.new_zeros(3)]) for place in places]
        return [piece.to(device) for piece in found]

    params = pieces(flat)
    states = [
        {name: torch.full_like(p, rule.initial(name, {})) for name in rule.slots}
        | {name: flat.new_full((), rule.initial(name, {}), device=device) for name in rule.scalars}
        for p in params
    ]
    for step in grads:
        for i, grad in enumerate(pieces(torch.cat([g.flatten() for g in step]))):
            terms = Terms(factors={}, whole=LocalTensor(shape=tuple(grad.shape)))
            params[i], states[i] = rule.update(params[i], grad, states[i], terms)

    def read() -> Tensor:
        found = torch.empty_like(flat)
        for place, piece in zip(places, params, strict=True):
            found[place] = piece.cpu()[:-3]
        return found

    return read


class _HostReadError(RuntimeError):
    """The class asked for a value on the device."""


class _NoHostReads(DispatchMode):
    """Refuses operations that wait for the device: `item`, `bool`, sizes that depend on values.

    A class may read what it keeps on the CPU, as torch's counters are.
    """

    _READS = (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.equal,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
    )

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation that reads nothing of the devices."""
        if func.overloadpacket in self._READS and args[0].device.type == self._device:
            raise _HostReadError(
                f"it reads a value back from the device ({func}) at every step, to choose by it "
                "what it computes, or to compute with it in Python"
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def _failures_of(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    try:
        yield
    except SpmdZeroConfigError:
        raise
    except _HostReadError as error:
        refuse(optimizer, str(error))
    # Foreign code may raise anything when it meets a stand-in.
    except Exception as error:
        refuse(optimizer, f"its step fails on a shard: {type(error).__name__}: {error}")


def _random(shape: Sequence[int], *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)
