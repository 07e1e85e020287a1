"""A torch optimizer whose first step is another, or whose counters are Python's numbers."""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spmdzero.optim._elementwise import TorchElementwise
from spmdzero.optim._initial_state import refuse
from spmdzero.optim._rule import Named, Terms, Updated
from spmdzero.optim._substituted import stand_in

_COUNT = "step"
_STEPS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstStepApart(TorchElementwise):
    """Runs a class's own `step` on shards twice: as the first step, and as a later one.

    A class may start a state from the parameter or the gradient, do something else at its first
    step, keep counters as Python's numbers, in its state or its group, and compute with `math`. The
    first step is run as it is, without a state. In a later one the counters stand for a count on
    the devices, so that no step compiles anew and a skipped one doesn't count; that count chooses
    which of the two results is kept.

    Attributes:
        counters, group_counters: a counter in the state or the group -> its value after one step.
        tensors: those counters of the state that the class keeps as tensors on the CPU.
    """

    counters: Mapping[str, float]
    group_counters: Mapping[str, float]
    tensors: frozenset[str]

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step."""
        count = state[_COUNT]
        first, first_state = self._run({}, param, grad, self.group)

        def counter(after_one: float) -> "_Count":
            # Here one step at least was made before.
            return _Count(count + (after_one - 1.0), least=after_one)

        held: dict[str, Any] = {name: state[name] * 1 for name in self.slots}
        held |= {name: counter(value) for name, value in self.counters.items()}
        # A class may ask whether its counter is a tensor, before it reads the number.
        counts = {name: held[name] for name in self.tensors}
        held |= {name: _plain(count) for name, count in counts.items()}
        group = {**self.group, **{k: counter(v) for k, v in self.group_counters.items()}}
        later, later_state = self._run(held, param, grad, group, counts=[*counts.values()])
        is_first = count == 0

        def chosen(one: Any, other: Any) -> Tensor:
            return torch.where(is_first, one.to(param.dtype), other.to(param.dtype))

        new = {
            name: terms.keep(chosen(first_state[name], later_state[name]), state[name])
            for name in self.slots
        }
        new[_COUNT] = terms.keep(count + 1, count)
        return chosen(first, later), new

    def _run(
        self,
        held: dict[str, Any],
        param: Tensor,
        grad: Tensor,
        group: Mapping[str, Any],
        *,
        counts: Sequence["_Count"] = (),
    ) -> tuple[Tensor, Mapping[str, Any]]:
        copied, parameter = stand_in(self.optimizer, group, held, param, grad)
        with _numbers_of(type(copied), counts):
            copied.step()
        return parameter.detach(), copied.state[parameter]


def first_step_apart(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> FirstStepApart:
    """The rule, not proven yet, of what the class keeps after each of its first steps.

    Raises:
        SpmdZeroConfigError: it keeps more than tensors of the parameter's shape, and counts.
    """
    generator = torch.Generator().manual_seed(1)
    param, *grads = torch.randn(_STEPS + 1, 6, 4, generator=generator, dtype=torch.float32)
    state: dict[str, Any] = {}
    copied, parameter = stand_in(optimizer, group, state, param, grads[0])
    numbers: list[dict[str, float]] = []
    of_group: list[dict[str, float]] = []
    now: Mapping[str, Any] = state
    for grad in grads:
        parameter.grad = grad.clone()
        copied.step()
        now = copied.state[parameter]
        numbers.append({k: float(v) for k, v in now.items() if _is_number(v)})
        then = copied.param_groups[0]
        of_group.append(
            {k: float(v) for k, v in then.items() if _is_number(v) and v != group.get(k)}
        )
    for name, value in now.items():
        whole = isinstance(value, Tensor) and value.shape == param.shape
        if not (whole or name in numbers[-1] or value is None):
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            refuse(optimizer, f"its state {name!r} of a [6, 4] parameter is {kind}")
    for found in (numbers, of_group):
        for name, value in found[0].items():
            if [each.get(name) for each in found] != [value + step for step in range(_STEPS)]:
                refuse(optimizer, f"its number {name!r} is no count of steps")
    slots = {k: 0.0 for k, v in now.items() if isinstance(v, Tensor) and v.shape == param.shape}
    return FirstStepApart(
        optimizer=optimizer,
        group=group,
        slot_values=slots,
        scalar_values={_COUNT: 0.0},
        capturable=False,
        counters=numbers[0],
        group_counters=of_group[0],
        tensors=frozenset(k for k in numbers[0] if isinstance(now[k], Tensor)),
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


class ChoiceError(RuntimeError):
    """A class chooses its way by a counter, whose number is on the devices."""


class _Count:
    """A count of steps on the devices, in the place of a Python number or a tensor.

    Args:
        tensor: 0-dim.
        least: the smallest number that it may be, by which comparisons are decided.
    """

    def __init__(self, tensor: Tensor, *, least: float) -> None:
        self._tensor, self._least = tensor, least

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function of torch's on the tensor."""
        return func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return _Count(self._tensor + other, least=self._least + other)
        return self._tensor + _plain(other)

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, int | float) else self._tensor - _plain(other)

    def add_(self, other: Any) -> "_Count":
        """Adds a number to the count."""
        self._tensor, self._least = self._tensor + other, self._least + other
        return self

    def rises_by(self, other: float) -> None:
        """Takes note of a number that is added to the tensor."""
        self._least += other

    def __mul__(self, other: Any) -> Tensor:
        return self._tensor * _plain(other)

    def __truediv__(self, other: Any) -> Tensor:
        return self._tensor / _plain(other)

    def __pow__(self, other: Any) -> Tensor:
        return self._tensor ** _plain(other)

    def __rsub__(self, other: Any) -> Tensor:
        return other - self._tensor

    def __rtruediv__(self, other: Any) -> Tensor:
        return other / self._tensor

    def __rpow__(self, other: Any) -> Tensor:
        return other**self._tensor

    def __neg__(self) -> Tensor:
        return -self._tensor

    __radd__, __rmul__, __iadd__ = __add__, __mul__, add_

    def __eq__(self, other: object) -> bool:
        self._decide(isinstance(other, int | float) and other < self._least)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: float) -> bool:
        self._decide(other < self._least)
        return True

    def __ge__(self, other: float) -> bool:
        self._decide(other <= self._least)
        return True

    def __lt__(self, other: float) -> bool:
        return not self >= other

    def __le__(self, other: float) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self > 0

    def __float__(self) -> float:
        self._decide(False)
        return math.nan

    __int__ = __index__ = __float__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def item(self) -> "_Count":
        """The count itself, as no number is known here."""
        return self

    def _decide(self, known: bool) -> None:
        if not known:
            raise ChoiceError("it chooses by its count of steps what it computes")


def _plain(value: Any) -> Any:
    return value._tensor if isinstance(value, _Count) else value


class _TensorFactors(TorchFunctionMode):
    """Lets `alpha` and `value` be 0-dim tensors, by which torch has only numbers multiply.

    Args:
        counts: counts whose tensors the class has; what it reads of one is the count.
    """

    def __init__(self, counts: Sequence[_Count]) -> None:
        super().__init__()
        self._counts = {id(_plain(count)): count for count in counts}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        count = self._counts.get(id(args[0])) if args else None
        if count is not None and func is torch.Tensor.item:
            return count
        if count is not None and func in (torch.Tensor.add_, torch.Tensor.__iadd__):
            count.rises_by(args[1])
        for word in ("alpha", "value"):
            factor = _plain(kwargs.get(word))
            if isinstance(factor, Tensor) and len(args) > 1:
                del kwargs[word]
                args = (args[0], args[1] * factor, *args[2:])
        return func(*args, **kwargs)


class _Math:
    """The module `math`, whose functions take tensors too."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(math, name)
        if not callable(plain) or not hasattr(torch, name):
            return plain

        def function(*numbers: Any) -> Any:
            given = [_plain(number) for number in numbers]
            on_devices = any(isinstance(number, Tensor) for number in given)
            return getattr(torch, name)(*given) if on_devices else plain(*given)

        return function


@contextlib.contextmanager
def _numbers_of(cls: type, counts: Sequence[_Count]) -> Iterator[None]:
    """Context in which the modules of a class, and of those that it derives from, take tensors."""
    modules = {sys.modules[each.__module__] for each in cls.__mro__}
    ours = [m for m in modules if vars(m).get("math") is math and m.__name__ != "torch.optim"]
    for module in ours:
        module.math = _Math()  # type: ignore[missing-attribute]
    try:
        with _TensorFactors(counts):
            yield
    finally:
        for module in ours:
            module.math = math  # type: ignore[missing-attribute]
