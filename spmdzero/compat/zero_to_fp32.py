"""`deepspeed.utils.zero_to_fp32`: fp32 weights from a checkpoint, ours or DeepSpeed's."""

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdzero.engine import release
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import Conversion, StoredTensor, convert, fp32_weights

logger = logging.getLogger("spmdzero")


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that is read when `contiguous` is called.

    Attributes:
        stored: where it is.
    """

    stored: StoredTensor

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return torch.Size(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.stored.dtype

    def contiguous(self) -> torch.Tensor:
        """The tensor, on the CPU."""
        return self.stored.whole()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The weights of a checkpoint as an fp32 state dict on the CPU, from the masters.

    Integer buffers keep their dtype; a tied weight is one tensor under each of its names.

    Args:
        checkpoint_dir: the folder passed to `save_checkpoint`, of spmdzero or DeepSpeed.
        tag: which checkpoint; what `latest` says by default.
        exclude_frozen_parameters: leave out what the optimizer did not train.
        lazy_mode: return a `LazyTensor` for each tensor, to be read one by one.

    Raises:
        SpmdZeroCheckpointError: it is damaged, or there is none.
    """
    weights = fp32_weights(Path(checkpoint_dir), tag, exclude_frozen=exclude_frozen_parameters)
    if not lazy_mode:
        return weights.state_dict()
    lazy = {name: LazyTensor(stored) for name, stored in weights.tensors.items()}
    return lazy | {alias: lazy[name] for alias, name in weights.tied.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights of a checkpoint to `output_dir`.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as for the function above.
        output_dir: for `pytorch_model.bin` or `model.safetensors`, with an index if there are
            several files.
        max_shard_size: of a file, such as ``"5GB"``.
        safe_serialization: safetensors in place of torch files.

    Raises:
        SpmdZeroCheckpointError: it is damaged, there is none, or the output can't be written.
    """
    conversion = Conversion(
        to="safetensors" if safe_serialization else "fp32",
        dtype=torch.float32,
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )
    convert(Path(checkpoint_dir), Path(output_dir), conversion, tag=tag)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """`model` itself, moved to the CPU, with the fp32 weights of a checkpoint.

    Parameters keep their dtype, as in DeepSpeed: the module of a bf16 engine gets them rounded, and
    the log says so. Where an engine trains `model`, it can't go on; what it trained is plain torch.

    Raises:
        SpmdZeroCheckpointError: it is damaged, or there is none; nothing has changed.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    release(model)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if dtypes:
        logger.warning(
            "the module keeps its %s, which the fp32 weights of %s were rounded to: for all of "
            "their digits pass a fresh model in fp32",
            ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            checkpoint_dir,
        )
    return model


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The file with the module and the client state of a checkpoint in DeepSpeed's format.

    Args:
        checkpoint_dir: the folder of one tag.
        zero_stage: at stage 3 it is the first rank's file, below that there is one.

    Raises:
        SpmdZeroCheckpointError: there is none, as in a checkpoint of spmdzero's own format.
    """
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return _deepspeeds_files(checkpoint_dir, f"{prefix}mp_rank_00_model_states.pt")[0]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files of the ranks' optimizers of a checkpoint in DeepSpeed's format, by rank.

    Raises:
        SpmdZeroCheckpointError: as `get_model_state_file`.
    """
    return _deepspeeds_files(checkpoint_dir, "*_optim_states.pt")


def _deepspeeds_files(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    found = [str(path) for path in Path(folder).glob(pattern)]
    if not found:
        raise SpmdZeroCheckpointError(
            file=folder,
            reason=f"has no {pattern}, the files of DeepSpeed's format",
            fix="spmdzero's own format is read by `get_fp32_state_dict_from_zero_checkpoint` and "
            "`spmdzero convert`; `engine.save_deepspeed_checkpoint` writes DeepSpeed's",
        )
    return sorted(found, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path)])
