"""The source of all files that are written for DeepSpeed."""

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmdzero._names import listed
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import RESET_AT, StoredTensor, TrainingState
from spmdzero.formats.deepspeed._flat import FlatGroup, Group, PartitionedGroup
from spmdzero.formats.deepspeed._host import COUNTERS
from spmdzero.formats.deepspeed._splits import ALONE, INFO, TensorParallel, record_of

# The DeepSpeed version with this layout.
VERSION = "0.19.8"
# DeepSpeed's default of zero_optimization.sub_group_size, in elements of a rank.
_SUB_GROUP = 10**9
_NOT_SLOTS = ("parameter", "buffer", "master", "accumulator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A training state, and the DeepSpeed run that will continue it.

    Attributes:
        state: the state to write.
        ranks: number of data-parallel processes of that run.
        stage: its ZeRO stage, 1 to 3.
        config: its JSON config, for the record; DeepSpeed reads its own. At stage 3 it must have
            the run's ``sub_group_size``, by which a rank's states are divided.
        tensor_parallel: its AutoTP ranks, each of which has `ranks` files.
        model_rank: the one of them whose part of the weights `state` has; `parts` sets it.
    """

    state: TrainingState
    ranks: int
    stage: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensor_parallel: TensorParallel = ALONE
    model_rank: int = 0

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise SpmdZeroUsageError(
                f"a DeepSpeed checkpoint of stage {self.stage}: it is written for ZeRO-1, ZeRO-2 "
                "or ZeRO-3. Choose stage 1, whose files a run at stage 2 reads too"
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
        shapes = {name: tensor.shape for name, tensor in self.named("parameter").items()}
        for key, tensor in self.state.tensors.items():
            slot, _, name = key.partition("/")
            if slot not in _NOT_SLOTS and tensor.shape not in ((), shapes.get(name, tensor.shape)):
                raise SpmdZeroUsageError(
                    f"{self.state.source}: {slot} of {name} has the shape {list(tensor.shape)}, "
                    "and DeepSpeed's files hold states of a parameter's own shape, which "
                    "Adafactor's rows and columns haven't. Save by save_checkpoint, or write its "
                    "weights: safetensors, fp32 or dcp"
                )
        reset = [n for g in self.state.host.param_groups for n in g.get(RESET_AT, ())]
        if reset:
            raise SpmdZeroUsageError(
                f"{self.state.source}: the optimizer's state of {listed(reset, most=5)} started "
                "anew apart from others', and DeepSpeed's files hold one count of updates for all. "
                "Save by save_checkpoint, or write its weights: safetensors, fp32 or dcp"
            )

    def parts(self) -> Iterator["Target"]:
        """Yields what each AutoTP rank is to write."""
        for rank in range(self.tensor_parallel.size):
            state = self.tensor_parallel.part(self.state, rank)
            yield dataclasses.replace(self, state=state, model_rank=rank)

    def named(self, role: str) -> dict[str, StoredTensor]:
        """The tensors of one role or slot, by parameter name."""
        prefix = f"{role}/"
        tensors = self.state.tensors.items()
        return {k.removeprefix(prefix): t for k, t in tensors if k.startswith(prefix)}

    @functools.cached_property
    def slots(self) -> dict[str, list[str]]:
        """Name of a trained parameter -> the slots of its optimizer states."""
        found: dict[str, list[str]] = {}
        for key in self.state.tensors:
            slot, _, name = key.partition("/")
            if slot not in _NOT_SLOTS:
                found.setdefault(name, []).append(slot)
        return found

    @functools.cached_property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups with trained parameters; ``"params"`` has no frozen ones."""
        groups = [
            group | {"params": [name for name in group["params"] if self._trains(name)]}
            for group in self.state.host.param_groups or ()
        ]
        return [group for group in groups if group["params"]]

    def _trains(self, name: str) -> bool:
        # An optimizer without states, such as plain SGD, doesn't show which parameters are frozen.
        return not self.slots or name in self.slots

    @functools.cached_property
    def layouts(self) -> list[list[Group]]:
        """The layout of each param group: one flat tensor, at stage 3 one or more."""
        shapes = {name: tensor.shape for name, tensor in self.named("parameter").items()}
        return [
            [self._layout({name: shapes[name] for name in names}) for names in divided]
            for divided in map(self._sub_groups, self.groups)
        ]

    def _layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Group:
        if self.stage == 3:
            return PartitionedGroup(shapes=shapes, ranks=self.ranks)
        return FlatGroup(shapes=shapes, gaps=(0,) * len(shapes))

    def _sub_groups(self, group: Mapping[str, Any]) -> list[list[str]]:
        """The sub-groups of a param group, as in DeepSpeed's `_create_fp16_sub_groups`."""
        names = list(group["params"])
        zero = self.config.get("zero_optimization") or {}
        given = zero.get("sub_group_size", "auto") if isinstance(zero, Mapping) else "auto"
        most = _SUB_GROUP if given == "auto" else int(given)
        parameters = self.named("parameter")
        sizes = {name: -(-math.prod(parameters[name].shape) // self.ranks) for name in names}
        if self.stage < 3 or most >= sum(sizes.values()):
            return [names]
        divided, held = [[]], 0
        for name in names:
            if held >= most:
                divided.append([])
                held = 0
            divided[-1].append(name)
            held += sizes[name]
        return divided

    @property
    def flat(self) -> list[Group]:
        """The flat tensors of which each rank holds a part, in torch's order."""
        return [layout for layouts in self.layouts for layout in layouts]

    def master(self, name: str) -> StoredTensor:
        """The weights that the optimizer updates."""
        tensors = self.state.tensors
        return tensors.get(f"master/{name}") or tensors[f"parameter/{name}"]

    @property
    def step(self) -> dict[str, torch.Tensor]:
        """The number of updates in the form of torch's optimizers: ``"step"``, 0-dim fp32.

        Empty where the state doesn't say: torch's SGD doesn't count updates.
        """
        applied = self.state.host.applied
        return {} if applied is None else {"step": torch.tensor(float(applied))}

    @property
    def bf16(self) -> bool:
        """Whether that run has ``bf16`` on, on which the names of its files depend."""
        return any(t.dtype == torch.bfloat16 for t in self.named("parameter").values())

    def model_file(self) -> dict[str, Any]:
        """The content of the model's file (DeepSpeed, runtime/engine.py, `_save_checkpoint`)."""
        parameters = {name: tensor.whole() for name, tensor in self.named("parameter").items()}
        frozen = {name: parameters[name] for name in self.frozen}
        return self._model_content(parameters, frozen)

    def model_file_of(self, rank: int) -> dict[str, Any]:
        """The content of one rank's model file at stage 3.

        It has the dtypes of trained parameters, and the rank's parts of frozen ones.
        """
        frozen = {}
        for name, tensor in self.frozen.items():
            alone = PartitionedGroup(shapes={name: tensor.shape}, ranks=self.ranks)
            part = alone.partition(rank, self.ranks)
            frozen[name] = part.filled({name: tensor}, dtype=tensor.dtype)
        parameters = self.named("parameter")
        empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in parameters.items()}
        return self._model_content(empty, frozen)

    @functools.cached_property
    def frozen(self) -> dict[str, StoredTensor]:
        """The parameters that the optimizer doesn't train."""
        trained = {name for group in self.flat for name in group.shapes}
        return {n: tensor for n, tensor in self.named("parameter").items() if n not in trained}

    def _model_content(
        self, parameters: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """The content of any model file, with the given parameters."""
        host, tied = self.state.host, self.state.host.tied
        buffers = {name: tensor.whole() for name, tensor in self.named("buffer").items()}
        aliases = {name: parameters[first] for name, first in tied.items()}
        shared = self.tensor_parallel
        own = {key: value for key, value in host.client_state.items() if key != INFO}
        if shared.size > 1:
            own[INFO] = record_of(shared.splits, shared.whole_shapes(self.named("parameter")))
        return own | {
            "module": OrderedDict({**parameters, **aliases, **buffers, **host.extra}),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, torch.Size(shape)) for name, shape in group.shapes.items())
                for group in self.flat
            ],
            "frozen_param_shapes": OrderedDict(
                (name, torch.Size(tensor.shape)) for name, tensor in self.frozen.items()
            ),
            "frozen_param_fragments": OrderedDict(frozen),
            "shared_params": dict(tied),
            "lr_scheduler": dict(host.scheduler) if host.scheduler is not None else None,
            "data_sampler": None,
            "random_ltd": None,
            **{key: host.counters.get(key, 0) for key in COUNTERS},
            "dp_world_size": self.ranks,
            "mp_world_size": shared.size,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": shared.size},
            "ds_config": dict(self.config),
            "ds_version": VERSION,
        }
