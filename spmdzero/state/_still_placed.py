"""Checks that an engine's module is still where the engine has put it, and puts back shards."""

import contextlib
from collections.abc import Hashable, Iterable, Iterator

import torch

from spmdzero.backend import Form, arrays, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.state._training import Training


def require_placed(training: Training) -> None:
    """Returns if the module's parameters are those that its engine trains, on the devices.

    Raises:
        SpmdZeroUsageError: a parameter was moved, for example by `module.cpu()`, or was replaced.
    """
    now = dict(training.module.named_parameters())
    for name, parameter in training.state.parameters.items():
        found = now.get(name)
        if found is not None and found is not parameter and arrays.is_mine(found):
            raise _not_planned(name)
        if found is not parameter or not arrays.is_mine(parameter):
            raise SpmdZeroUsageError(
                f"{name} is not the parameter on the devices any more that this engine trains: the "
                "module was moved, by module.cpu(), module.to(...) or zero_to_fp32. Make a new "
                "engine of it by spmdzero.initialize, and load_checkpoint into that one"
            )


def require_planned(training: Training) -> None:
    """Returns if every parameter of the module that requires a gradient was planned.

    Raises:
        SpmdZeroUsageError: a parameter was added after `initialize`, or was replaced.
    """
    planned = training.state.parameters
    for name, parameter in training.module.named_parameters():
        if parameter.requires_grad and planned.get(name) is not parameter:
            raise _not_planned(name)


def _not_planned(name: str) -> SpmdZeroUsageError:
    return SpmdZeroUsageError(
        f"{name} is a parameter of the module since after initialize, where the sharding plan "
        "placed all states: it has none, and would not be trained. Add it before initialize, or "
        f"make a new engine of the module; to use it untrained, {name}.requires_grad_(False). A "
        f"new value belongs into the old parameter: {name}.data.copy_(value)"
    )


@contextlib.contextmanager
def naming_what_left(training: Training) -> Iterator[None]:
    """Replaces an error inside the context by that of `require_placed`, if the module was moved.

    Raises:
        SpmdZeroUsageError: as in `require_placed`.
    """
    try:
        yield
    except Exception:
        require_placed(training)
        raise


class FrozenShards:
    """Has frozen parameters that rest as shards do so again after a script has written them.

    A value that is written between two steps, as by `weight.data.fill_(0)`, is computed whole on
    every device. A step leaves the parameters that it trains as shards, and frozen ones as they
    are.

    Args:
        training: a training whose parameters are at rest.
    """

    def __init__(self, training: Training) -> None:
        plan = training.plan
        self._training = training
        self._parameters = {
            name: parameter
            for name, parameter in training.state.parameters.items()
            if plan.at_rest(f"parameter/{name}").is_sharded and not plan[name].trainable
        }
        self._forms = dict(zip(self._parameters, self._now(self._parameters), strict=True))
        self._stamps = self._stamped()

    @torch.no_grad()
    def put_back(self) -> None:
        """Splits those that were written since the latest call, before a program reads them."""
        stamps = self._stamped()
        if stamps == self._stamps:
            return
        written = [name for name in stamps if stamps[name] != self._stamps[name]]
        for name, form in zip(written, self._now(written), strict=True):
            if form != self._forms[name]:
                parameter = self._parameters[name]
                whole = arrays.fresh(parameter)
                self._training.state.write(f"parameter/{name}", whole, known=parameter)
        # With a pending write the step that follows would need a different program.
        runtime.sync()
        self._stamps = self._stamped()

    def _now(self, names: Iterable[str]) -> list[Form]:
        return arrays.forms_of([self._parameters[name] for name in names])

    def _stamped(self) -> dict[str, Hashable]:
        return {name: arrays.write_stamp(p) for name, p in self._parameters.items()}
