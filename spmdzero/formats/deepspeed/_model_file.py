"""The model's file: weights, buffers, counters, and further values."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spmdzero.formats._state import StoredTensor
from spmdzero.formats.deepspeed._pickles import damaged, read_pt


def model_file(rank: int = 0) -> str:
    """The name of the file of a model-parallel rank, which has its weights below stage 3."""
    return f"mp_rank_{rank:02d}_model_states.pt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The contents of the model's file.

    Attributes:
        path: of the file; the first rank's if there are several.
        content: the whole content.
        parameters: by name; tied ones once, under their first name.
        buffers: by name.
        tied: further name of a tied parameter -> its first name.
        extra: results of modules' `get_extra_state`.
    """

    path: Path
    content: Mapping[str, Any]
    parameters: Mapping[str, StoredTensor]
    buffers: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    extra: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ModelFile":
        """Reads the file of a module that holds its parameters whole.

        Raises:
            SpmdZeroCheckpointError: as `model_content`.
        """
        return cls.of(path, model_content(path))

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any]) -> "ModelFile":
        """Sorts the state dict under ``"module"`` of a file's content."""
        buffer_names = set(content.get("buffer_names") or ())
        parameters: dict[str, StoredTensor] = {}
        buffers: dict[str, StoredTensor] = {}
        tied: dict[str, str] = {}
        extra: dict[str, Any] = {}
        places: dict[Any, str] = {}
        for name, value in content["module"].items():
            if not isinstance(value, torch.Tensor):
                extra[name] = value
            elif name in buffer_names:
                buffers[name] = StoredTensor.of(value)
            else:
                # Tied parameters share a storage, which torch.load keeps shared.
                place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
                first = places.setdefault(place, name)
                if first == name:
                    parameters[name] = StoredTensor.of(value)
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
    def model_ranks(self) -> int:
        """Number of model-parallel ranks of the run that wrote it; each has a part of a weight."""
        return int(self.content.get("mp_world_size") or 1)

    @property
    def trained(self) -> list[dict[str, tuple[int, ...]]] | None:
        """See `trained_shapes`."""
        return trained_shapes(self.content)

    def tensors(self) -> dict[str, StoredTensor]:
        """Parameters and buffers by the names of `TrainingState.tensors`."""
        named = {f"parameter/{name}": tensor for name, tensor in self.parameters.items()}
        return named | {f"buffer/{name}": tensor for name, tensor in self.buffers.items()}


def model_content(path: Path) -> dict[str, Any]:
    """The content of a model's file.

    Raises:
        SpmdZeroCheckpointError: it can't be read, or holds no model.
    """
    content = read_pt(path)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        raise damaged(path, "it holds no DeepSpeed model (no 'module')")
    return content


def trained_shapes(content: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]] | None:
    """The shapes of the parameters, in order, in each flat group of an optimizer; None at stage 0.

    At stages 1 and 2 a param group has one flat group, at stage 3 it has one or more.
    """
    shapes = content.get("param_shapes")
    if shapes is None:
        return None
    groups = [shapes] if isinstance(shapes, dict) else shapes
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]
