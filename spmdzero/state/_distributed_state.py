"""A running engine's state as DTensors, for `torch.distributed.checkpoint`."""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats import RESET_AT, HostState, TrainingState, host_bytes, host_from
from spmdzero.state._dtensors import DTensors
from spmdzero.state._live_state import live_state
from spmdzero.state._restore import LoadOptions, restore
from spmdzero.state._tensor_matching import LoadReport
from spmdzero.state._training import Training

_Tree = dict[str, Any]
_WEIGHTS = ("parameter", "buffer")


class DistributedState:
    """The state of `training` under the names of `torch.distributed.checkpoint.state_dict`.

    It is torch's `Stateful`: `dcp.save({"engine": state})` and `dcp.load({"engine": state})` take
    it, and every host calls them.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._dtensors = DTensors(training)

    def state_dict(self) -> _Tree:
        """A copy of the state in the host's memory.

        - ``model.<name>``: DTensor, the module's parameters and buffers in their dtypes.
        - ``optim.state.<name>.<slot>``: DTensor, the optimizer's states; ``master`` is fp32's copy
          of a parameter in another dtype, ``step`` a number of updates, fp32, 0-dim on the CPU.
        - ``optim.param_groups``: hyperparameters.
        - ``engine``: bytes of counters, schedule, loss scale and generators.

        A rank of their `DeviceMesh` is a host. A tensor is `Shard` where each host's devices hold
        the host's chunk of one dim, else `Replicate`: a small one, one that the engine has
        flattened or cut over devices first and hosts then, and any in a run of one process.

        Raises:
            SpmdZeroUsageError: in the middle of gradient accumulation.
        """
        state = live_state(self._training)
        if state.host.accumulation is not None:
            raise SpmdZeroUsageError(
                "distributed_state().state_dict() in the middle of gradient accumulation: torch's "
                "names have none for its gradients. Call it after engine.step(), or use "
                "engine.save_checkpoint"
            )
        model, states = _Tree(), dict[str, _Tree]()
        resets = _resets(state.host)
        for key, value in self._dtensors.of(state.tensors).items():
            role, _, name = key.partition("/")
            if role in _WEIGHTS:
                model[name] = value
            else:
                step = torch.tensor(float((state.host.applied or 0) - resets.get(name, 0)))
                states.setdefault(name, {"step": step})[role] = value
        found: _Tree = {"model": model | {k: model[n] for k, n in state.host.tied.items()}}
        if state.host.param_groups is not None:
            found["optim"] = {"state": states, "param_groups": state.host.param_groups}
        return found | {"engine": host_bytes(state.host)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> LoadReport:
        """Loads what `dcp.load` has read into a `state_dict()`.

        Args:
            state_dict: as of `state_dict`. ``model`` alone is enough: masters are made of it then,
                and the optimizer's states stay. Without ``engine`` the counters start at the
                number of updates in ``step``.

        Returns the tensors that it left out.

        Raises:
            SpmdZeroCheckpointError: it doesn't fit; nothing has changed.
        """
        live = live_state(self._training)
        tied, cuts = live.host.tied, self._dtensors.cuts(live.tensors)
        tensors = {
            f"{role}/{name}": self._dtensors.stored(value, cuts.get(f"{role}/{name}"))
            for role, name, value in _named(state_dict, self._training)
            if name not in tied or role not in _WEIGHTS
        }
        state = TrainingState(
            tensors=tensors, host=_host_state(state_dict), source="torch.distributed.checkpoint"
        )
        options = LoadOptions(
            optimizer="optim" in state_dict, module_only="optim" not in state_dict
        )
        return restore(self._training, state, options)


def _resets(host: HostState) -> dict[str, int]:
    return {n: at for group in host.param_groups or () for n, at in group.get(RESET_AT, {}).items()}


def _named(given: Mapping[str, Any], training: Training) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields role, name and value of each tensor."""
    parameters = dict(training.module.named_parameters(remove_duplicate=False))
    for name, value in given["model"].items():
        yield "parameter" if name in parameters else "buffer", name, value
    for name, states in given.get("optim", {}).get("state", {}).items():
        yield from ((slot, name, value) for slot, value in states.items() if slot != "step")


def _host_state(given: Mapping[str, Any]) -> HostState:
    if "optim" not in given:
        return HostState()
    groups = given["optim"]["param_groups"]
    if "engine" in given:
        host = host_from(io.BytesIO(given["engine"]))
        return dataclasses.replace(host, param_groups=groups)
    steps = [int(states["step"]) for states in given["optim"]["state"].values()]
    applied = max(steps, default=0)
    return HostState(param_groups=groups, applied=applied, counters={"global_steps": applied})
