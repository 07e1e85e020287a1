"""`deepspeed.utils.zero_to_fp32`: fp32 weights from a checkpoint of spmdzero or DeepSpeed."""

import argparse
import dataclasses
import logging
import os
import re
from collections.abc import Sequence
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
        stored: the tensor's place in the checkpoint.
    """

    stored: StoredTensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return torch.Size(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
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
        tag: the checkpoint's tag; by default the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that the optimizer did not train.
        lazy_mode: return a `LazyTensor` for each tensor, to be read one by one.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged, or there is none.
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
        checkpoint_dir, tag, exclude_frozen_parameters: as in
            `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: folder for `pytorch_model.bin` or `model.safetensors`, with an index if there
            are several files.
        max_shard_size: largest size of a file, such as ``"5GB"``.
        safe_serialization: write safetensors instead of torch files.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged or missing, or the output can't be
            written.
    """
    conversion = Conversion(
        to="safetensors" if safe_serialization else "fp32",
        dtype=torch.float32,
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )
    convert(Path(checkpoint_dir), Path(output_dir), conversion, tag=tag)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the fp32 weights that a command line asks for, with the options of DeepSpeed's script.

    Args:
        arguments: of the command; those of this process by default.

    Raises:
        SpmdZeroCheckpointError: as in `convert_zero_checkpoint_to_fp32_state_dict`.
        SystemExit: an argument is missing or unknown.
    """
    parser = argparse.ArgumentParser(description="Writes the fp32 weights of a checkpoint")
    parser.add_argument("checkpoint_dir", help="the folder passed to save_checkpoint")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="of each file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint; the one that `latest` names")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what wasn't trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="more messages")
    given = vars(parser.parse_args(arguments))
    if given.pop("debug"):
        logging.basicConfig(level=logging.DEBUG)
    convert_zero_checkpoint_to_fp32_state_dict(**given)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Moves `model` to the CPU, loads a checkpoint's fp32 weights, and returns `model` itself.

    Parameters keep their dtype, as in DeepSpeed: the module of a bf16 engine gets rounded weights,
    and the log says so. An engine that trains `model` can't go on; the module is plain torch then.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged or missing; `model` has not changed.
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
        zero_stage: the ZeRO stage; at stage 3 the file is the first rank's, below there is only
            one.

    Raises:
        SpmdZeroCheckpointError: there is no such file, as in a checkpoint of spmdzero's format.
    """
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return _deepspeeds_files(checkpoint_dir, f"{prefix}mp_rank_00_model_states.pt")[0]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files with the ranks' optimizer states in DeepSpeed's format, in order of rank.

    Raises:
        SpmdZeroCheckpointError: as in `get_model_state_file`.
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
