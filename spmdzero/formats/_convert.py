"""Converts a checkpoint to another format."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats._boxes import Box, box_shape
from spmdzero.formats._eight_bits import in_eight_bits
from spmdzero.formats._latest import LATEST, LATEST_UNIVERSAL, write_latest
from spmdzero.formats._open import locate, open_state
from spmdzero.formats._state import StoredTensor, TrainingState
from spmdzero.formats.deepspeed import (
    ALONE,
    NUMBER,
    Target,
    TensorParallel,
    without_debt,
    write_regular,
    write_universal,
)
from spmdzero.formats.export import (
    Weights,
    frozen_names,
    write_safetensors,
    write_state_dict,
)
from spmdzero.formats.native import Retention, SaveOrder, save_native

Format = Literal["native", "universal", "deepspeed", "safetensors", "dcp", "fp32"]
FORMATS: tuple[str, ...] = get_args(Format)
_WEIGHTS = ("safetensors", "fp32")
OnBytes = Callable[[int, int], None]
"""Called for each part that was read: with its bytes, and roughly the bytes of all parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The format and options of a conversion.

    Attributes:
        to: ``"native"``, ``"universal"`` or ``"deepspeed"``, from which training goes on; or the
            weights as ``"safetensors"`` (Hugging Face's), ``"fp32"`` (a torch state dict) or
            ``"dcp"`` (torch's distributed checkpoint, with the optimizer's states).
        ranks: for ``"deepspeed"``: number of processes that will load it.
        stage: for ``"deepspeed"`` and ``"universal"``: the ZeRO stage that is written into it.
        dtype: of the weights, for ``"safetensors"`` and ``"dcp"``; None keeps their own.
        max_shard_size: of each file, for ``"safetensors"`` and ``"fp32"``.
        exclude_frozen: whether to leave out parameters that no optimizer trained.
    """

    to: Format
    ranks: int | None = None
    stage: int = 2
    dtype: torch.dtype | None = None
    max_shard_size: int | str = "5GB"
    exclude_frozen: bool = False

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise SpmdZeroUsageError(f"convert to {self.to!r}: write one of {', '.join(FORMATS)}")
        if self.to == "deepspeed" and self.ranks is None:
            raise SpmdZeroUsageError(
                "DeepSpeed's regular format has a file for each rank: say how many processes will "
                "load it (--ranks 8), or convert to universal, which any number of them can load"
            )


def convert(
    source: Path,
    target: Path,
    conversion: Conversion,
    *,
    tag: str | None = None,
    progress: OnBytes = lambda read, total: None,
) -> Path:
    """Writes the checkpoint at `source` to `target` in another format; needs no device.

    Args:
        source: a folder of checkpoints, or the folder of one tag; native or DeepSpeed's.
        target: the output; a folder of checkpoints for the three formats that can be trained on.
        conversion: the format and its options.
        tag: the checkpoint in `source`; the one that `latest` names by default.
        progress: called after each part that was read.

    Returns the folder or file that was written.

    Raises:
        SpmdZeroCheckpointError: the source is damaged or missing, or the target can't be written.
        SpmdZeroUsageError: the checkpoint doesn't have what the format holds.
    """
    folder, tag = locate(source, tag)
    state = open_state(folder, tag).checked()
    exact = conversion.to == "fp32" or conversion.dtype == torch.float32
    weights_only = conversion.to in _WEIGHTS
    _require_names(state, weights_only=weights_only, masters=exact)
    read = Weights.of(state, dtype=torch.float32 if exact else None) if weights_only else state
    total = sum(tensor.size for tensor in read.tensors.values())
    state = _watched(state, lambda count: progress(count, total))
    try:
        return _write(state, target, tag, conversion)
    except OSError as error:
        raise SpmdZeroCheckpointError(
            file=error.filename or target, reason=f"can't be written: {error.strerror or error}"
        ) from error


def fp32_weights(source: Path, tag: str | None = None, *, exclude_frozen: bool = False) -> Weights:
    """The fp32 weights of a checkpoint, which are read tensor by tensor.

    Args:
        source, tag: as for `convert`.
        exclude_frozen: whether to leave out parameters that no optimizer trained.

    Raises:
        SpmdZeroCheckpointError: the checkpoint is damaged, or there is none.
    """
    state = open_state(*locate(source, tag)).checked()
    _require_names(state, weights_only=True, masters=True)
    exclude = frozen_names(state) if exclude_frozen else frozenset[str]()
    return Weights.of(state, dtype=torch.float32, exclude=exclude)


def _require_names(state: TrainingState, *, weights_only: bool, masters: bool) -> None:
    weights = [t for key, t in state.tensors.items() if key.startswith("parameter/")]
    if weights_only and (not masters or all(t.dtype == torch.float32 for t in weights)):
        return
    groups = state.host.param_groups or ()
    if any(name.startswith(NUMBER) for group in groups for name in group["params"]):
        raise SpmdZeroUsageError(
            f"{state.source}: at stage 0 DeepSpeed saves the optimizer's states, and the masters "
            "of 16-bit weights, by number; which parameter has which only the script knows. Load "
            "it into an engine by engine.load_checkpoint, and save it from there"
        )


def _write(state: TrainingState, target: Path, tag: str, conversion: Conversion) -> Path:
    if conversion.to == "native":
        order = SaveOrder(
            folder=target,
            tag=tag.removesuffix("_universal"),
            nonce=secrets.token_hex(4),
            latest=True,
            retention=Retention(),
            description={"counters": dict(state.host.counters), "converted": state.source},
        )
        save_native(state, order)
        return order.path
    if conversion.to in ("universal", "deepspeed"):
        return write_for_deepspeed(state, target, tag, conversion)
    exclude = frozen_names(state) if conversion.exclude_frozen else frozenset[str]()
    if conversion.to == "dcp":
        # Import it here: torch's module for it takes a quarter of a second to import, in each
        # process.
        from spmdzero.formats.export._dcp import write_dcp

        write_dcp(state, target, dtype=conversion.dtype, exclude=exclude)
        return target
    dtype = torch.float32 if conversion.to == "fp32" else conversion.dtype
    weights = Weights.of(state, dtype=dtype, exclude=exclude)
    write = write_state_dict if conversion.to == "fp32" else write_safetensors
    write(weights, target, max_shard_size=conversion.max_shard_size)
    return target


def write_for_deepspeed(
    state: TrainingState,
    folder: Path,
    tag: str,
    conversion: Conversion,
    *,
    config: Mapping[str, object] | None = None,
    latest: bool = True,
    tensor_parallel: TensorParallel = ALONE,
) -> Path:
    """Writes `<folder>/<tag>` in one of DeepSpeed's formats, and the file that names the tag.

    The universal format goes to `<tag>_universal`, named by `latest_universal`, as DeepSpeed's own
    converter does it. With `tensor_parallel` each of those ranks' files have its part of the
    weights. Returns the tag's folder.

    Raises:
        SpmdZeroCheckpointError: no space, or no permission.
        SpmdZeroUsageError: no run can continue from the state, or DeepSpeed can't yet
            (`without_debt`).
    """
    universal = conversion.to == "universal"
    target = Target(
        state=without_debt(in_eight_bits(state, {})),
        ranks=conversion.ranks or 1,
        stage=conversion.stage,
        config=config or {},
        tensor_parallel=tensor_parallel,
    )
    tag = tag.removesuffix("_universal") + ("_universal" if universal else "")
    (write_universal if universal else write_regular)(target, folder / tag)
    if latest:
        write_latest(folder, tag, LATEST_UNIVERSAL if universal else LATEST)
    return folder / tag


def _watched(state: TrainingState, progress: Callable[[int], None]) -> TrainingState:
    """The same state, with each read reported to `progress`."""

    def watch(tensor: StoredTensor) -> StoredTensor:
        def read(box: Box) -> torch.Tensor:
            part = tensor.read(box)
            progress(math.prod(box_shape(box)) * tensor.dtype.itemsize)
            return part

        return dataclasses.replace(tensor, read=read)

    return dataclasses.replace(
        state, tensors={name: watch(tensor) for name, tensor in state.tensors.items()}
    )
