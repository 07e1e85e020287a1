"""What every file that is written for DeepSpeed is made from."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from spmdzero._names import listed
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import RESET_AT, StoredTensor, TrainingState
from spmdzero.formats.deepspeed._flat import FlatGroup
from spmdzero.formats.deepspeed._host import COUNTERS

# The DeepSpeed whose layout this is.
VERSION = "0.19.8"
_NOT_SLOTS = ("parameter", "buffer", "master", "accumulator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A training state, and the DeepSpeed run that is to go on with it.

    Attributes:
        state: what is written.
        ranks: data-parallel processes of that run.
        stage: its ZeRO stage, 1 or 2.
        config: its JSON, for the record; DeepSpeed reads its own.
    """

    state: TrainingState
    ranks: int
    stage: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise SpmdZeroUsageError(
                f"a DeepSpeed checkpoint of stage {self.stage}: it is written for ZeRO-1 or "
                "ZeRO-2. Choose stage 1, whose files a run at stage 2 reads too"
            )
        if self.ranks < 1:
            raise SpmdZeroUsageError(
                f"a DeepSpeed checkpoint for {self.ranks} ranks: use 1 or more"
            )
        if self.state.host.param_groups is None:
            raise SpmdZeroUsageError(
                f"{self.state.source} holds no optimizer state, so no run can go on from it. "
                "Write its weights: safetensors, fp32 or dcp"
            )
        if any(name.startswith("accumulator/") for name in self.state.tensors):
            raise SpmdZeroUsageError(
                f"{self.state.source} is in the middle of gradient accumulation, which DeepSpeed's "
                "files can't hold. Save after a gradient accumulation boundary"
            )
        reset = [n for g in self.state.host.param_groups for n in g.get(RESET_AT, ())]
        if reset:
            raise SpmdZeroUsageError(
                f"{self.state.source}: the optimizer's state of {listed(reset, most=5)} started "
                "anew apart from others', and DeepSpeed's files hold one count of updates for all. "
                "Save by save_checkpoint, or write its weights: safetensors, fp32 or dcp"
            )

    def named(self, role: str) -> dict[str, StoredTensor]:
        """Parameter name -> tensor, of one role or slot."""
        prefix = f"{role}/"
        tensors = self.state.tensors.items()
        return {k.removeprefix(prefix): t for k, t in tensors if k.startswith(prefix)}

    @functools.cached_property
    def slots(self) -> dict[str, list[str]]:
        """Trained parameter -> the optimizer's slots of it."""
        found: dict[str, list[str]] = {}
        for key in self.state.tensors:
            slot, _, name = key.partition("/")
            if slot not in _NOT_SLOTS:
                found.setdefault(name, []).append(slot)
        return found

    @functools.cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups with something to train, their ``"params"`` without frozen ones."""
        groups = [
            group | {"params": [name for name in group["params"] if self._trains(name)]}
            for group in self.state.host.param_groups or ()
        ]
        return [group for group in groups if group["params"]]

    def _trains(self, name: str) -> bool:
        # An optimizer without states, such as plain SGD, tells nothing about what is frozen.
        return not self.slots or name in self.slots

    @functools.cached_property
    def flat(self) -> list[FlatGroup]:
        """How each param group is laid out."""
        shapes = {name: tensor.shape for name, tensor in self.named("parameter").items()}
        return [
            FlatGroup(
                shapes={name: shapes[name] for name in group["params"]},
                gaps=(0,) * len(group["params"]),
            )
            for group in self.groups
        ]

    def master(self, name: str) -> StoredTensor:
        """The weights that the optimizer updates."""
        tensors = self.state.tensors
        return tensors.get(f"master/{name}") or tensors[f"parameter/{name}"]

    @property
    def step(self) -> dict[str, torch.Tensor]:
        """How many updates there were, as torch's optimizers keep it: ``"step"``, 0-dim fp32.

        Empty where the state doesn't say: torch's SGD doesn't count them.
        """
        applied = self.state.host.applied
        return {} if applied is None else {"step": torch.tensor(float(applied))}

    @property
    def bf16(self) -> bool:
        """Whether that run has ``bf16`` on, by which its files are named."""
        return any(t.dtype == torch.bfloat16 for t in self.named("parameter").values())

    def model_file(self) -> dict[str, Any]:
        """The contents of the model's file (DeepSpeed, runtime/engine.py, `_save_checkpoint`)."""
        host, tied = self.state.host, self.state.host.tied
        parameters = {name: tensor.whole() for name, tensor in self.named("parameter").items()}
        buffers = {name: tensor.whole() for name, tensor in self.named("buffer").items()}
        trained = {name for group in self.flat for name in group.shapes}
        frozen = {name: tensor for name, tensor in parameters.items() if name not in trained}
        aliases = {name: parameters[first] for name, first in tied.items()}
        return dict(host.client_state) | {
            "module": OrderedDict(parameters | aliases | buffers | dict(host.extra)),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in group.shapes.items())
                for group in self.flat
            ],
            "frozen_param_shapes": OrderedDict((name, t.shape) for name, t in frozen.items()),
            "frozen_param_fragments": OrderedDict(frozen),
            "shared_params": dict(tied),
            "lr_scheduler": dict(host.scheduler) if host.scheduler is not None else None,
            "data_sampler": None,
            "random_ltd": None,
            **{key: host.counters.get(key, 0) for key in COUNTERS},
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": dict(self.config),
            "ds_version": VERSION,
        }
