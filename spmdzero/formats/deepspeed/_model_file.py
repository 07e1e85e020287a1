"""The model's file: weights, buffers, counters, and what belongs to no tensor."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._pickles import damaged, read_pt

MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The model's file, taken apart.

    Attributes:
        path: where it is.
        content: all of it.
        parameters: name -> CPU tensor, tied ones once, under their first name.
        buffers: name -> CPU tensor.
        tied: further name of a tied parameter -> the name it is under.
        extra: what modules returned from `get_extra_state`.
    """

    path: Path
    content: Mapping[str, Any]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    extra: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ModelFile":
        """Reads the file.

        Raises:
            SpmdZeroCheckpointError: it can't be read, or is of another parallelism than that
                over data.
        """
        content = read_pt(path)
        if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
            raise damaged(path, "it holds no DeepSpeed model (no 'module')")
        if content.get("mp_world_size", 1) != 1:
            raise damaged(
                path,
                f"tensor parallelism over {content['mp_world_size']} ranks wrote it",
                "spmdzero is data-parallel: merge it with DeepSpeed first, and save that",
            )
        buffer_names = set(content.get("buffer_names") or ())
        parameters: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        extra: dict[str, Any] = {}
        places: dict[Any, str] = {}
        for name, value in content["module"].items():
            if not isinstance(value, torch.Tensor):
                extra[name] = value
            elif name in buffer_names:
                buffers[name] = value
            else:
                # Tied parameters share a storage, which torch.load keeps shared.
                place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
                first = places.setdefault(place, name)
                if first == name:
                    parameters[name] = value
                else:
                    tied[name] = first
        return cls(
            path=path,
            content=content,
            parameters=parameters,
            buffers=buffers,
            tied=tied,
            extra=extra,
        )

    @property
    def trained(self) -> list[dict[str, tuple[int, ...]]] | None:
        """For each param group the parameters' shapes in flat order; None at stage 0."""
        shapes = self.content.get("param_shapes")
        if shapes is None:
            return None
        groups = [shapes] if isinstance(shapes, dict) else shapes
        return [{name: tuple(shape) for name, shape in group.items()} for group in groups]

    def tensors(self) -> dict[str, StoredTensor]:
        """Parameters and buffers by the names of `TrainingState.tensors`."""
        named = {f"parameter/{name}": tensor for name, tensor in self.parameters.items()}
        named |= {f"buffer/{name}": tensor for name, tensor in self.buffers.items()}
        return {name: StoredTensor.of(tensor) for name, tensor in named.items()}
