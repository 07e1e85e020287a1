"""Writes a training state for a run of real DeepSpeed to go on with."""

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats.deepspeed._host import loss_scaler
from spmdzero.formats.deepspeed._model_file import MODEL_FILE
from spmdzero.formats.deepspeed._pickled_classes import FragmentAddress, ZeroStageEnum
from spmdzero.formats.deepspeed._pickles import write_pt
from spmdzero.formats.deepspeed._read import recognises
from spmdzero.formats.deepspeed._target import VERSION, Target
from spmdzero.formats.deepspeed._universal import GLOBAL_STATE, STATES


def write_regular(target: Target, folder: Path) -> None:
    """Writes what the ranks of `target` would have written under ZeRO-1/2.

    DeepSpeed loads it by `engine.load_checkpoint` with exactly that many ranks. One rank's part of
    the states is in memory at a time.

    Args:
        target: the state and the run.
        folder: `<save_dir>/<tag>`; it appears when it is complete, and replaces one of its name.

    Raises:
        SpmdZeroCheckpointError: no space, no permission, or `folder` holds something else.
    """
    prefix = "bf16_" if target.bf16 else ""
    with _appearing(folder) as new:
        write_pt(target.model_file(), new / MODEL_FILE)
        for rank in range(target.ranks):
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            write_pt(_rank_file(target, rank), new / name)


def write_universal(target: Target, folder: Path) -> None:
    """Writes DeepSpeed's universal format: a folder for each parameter, whole tensors.

    DeepSpeed of any number of ranks loads it with ``"checkpoint": {"load_universal": true}``. One
    tensor is in memory at a time, apart from the module's weights.

    Args and Raises: as `write_regular`.
    """
    with _appearing(folder) as new:
        write_pt(target.model_file(), new / MODEL_FILE)
        for group in target.flat:
            for name in group.shapes:
                at = new / STATES / name
                master = target.master(name)
                write_pt({"cat_dim": 0, "param": master.whole().float()}, at / "fp32.pt")
                for slot in target.slots.get(name, ()):
                    value = target.state.tensors[f"{slot}/{name}"].whole().float()
                    of_shape = tuple(value.shape) == master.shape
                    content = {"cat_dim": 0, "param": value} if of_shape else value
                    write_pt(content, at / f"{slot}.pt")
                for key, value in target.step.items() if name in target.slots else ():
                    write_pt(value, at / f"{key}.pt")
        shared = _global_state(target) | {"param_groups": _param_groups(target)}
        write_pt(shared, new / STATES / GLOBAL_STATE)


def _rank_file(target: Target, rank: int) -> dict[str, Any]:
    """The contents of one rank's file (DeepSpeed, runtime/zero/stage_1_and_2.py, `state_dict`)."""
    tensors = target.state.tensors
    parts = [group.partition(rank, target.ranks) for group in target.flat]
    states: dict[int, dict[str, Any]] = {}
    for index, part in enumerate(parts):
        shapes = part.group.shapes
        slots = target.slots.get(next(iter(shapes)), ())
        # A step without states would keep torch's optimizers from making their own.
        states[index] = dict(target.step) if slots else {}
        for slot in slots:
            stored = {name: tensors[f"{slot}/{name}"] for name in shapes}
            if all(tensor.shape == shapes[name] for name, tensor in stored.items()):
                states[index][slot] = part.filled(stored)
            else:
                states[index][slot] = next(iter(stored.values())).whole().float()
    state = _global_state(target) | {
        "base_optimizer_state": {"state": states, "param_groups": _param_groups(target)},
        # Padding at the end is left out of the weights, and kept in the states.
        "single_partition_of_fp32_groups": [
            part.filled({n: target.master(n) for n in part.group.shapes})[: part.used].clone()
            for part in parts
        ],
        "group_paddings": [part.size - part.used for part in parts],
        "param_slice_mappings": [
            OrderedDict(
                (name, FragmentAddress(numel=stop - start, start=place))
                for name, start, stop, place in part.pieces()
            )
            for part in parts
        ],
    }
    return {
        "optimizer_state_dict": state,
        "ds_config": dict(target.config),
        "ds_version": VERSION,
    }


def _global_state(target: Target) -> dict[str, Any]:
    """What is the same in all of the optimizer's files."""
    scaler = target.state.host.scaler
    state = {
        "overflow": False,
        "zero_stage": ZeroStageEnum(target.stage),
        "param_alignment_paddings": [list(group.gaps) for group in target.flat],
        "partition_count": [target.ranks for _ in target.flat],
        "ds_version": VERSION,
    }
    if scaler is None:
        return state  # DeepSpeed keeps the scaler that its config asks for
    record = loss_scaler(scaler)
    return state | {"loss_scaler": record, "dynamic_loss_scale": record.dynamic}


def _param_groups(target: Target) -> list[dict[str, Any]]:
    # DeepSpeed's own Adam needs the key, torch's has it not and lets it pass.
    return [
        ({"bias_correction": True} if "betas" in group else {}) | group | {"params": [index]}
        for index, group in enumerate(target.groups)
    ]


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder, which takes the place of `folder` if all goes well and is removed if not."""
    if folder.is_dir() and any(folder.iterdir()) and not recognises(folder):
        raise SpmdZeroCheckpointError(
            file=folder,
            reason="holds something that is no DeepSpeed checkpoint, which would be replaced",
            fix="Choose another tag or folder",
        )
    new = folder.with_name(f".{folder.name}.tmp")
    old = folder.with_name(f".{folder.name}.old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    except OSError as error:
        raise SpmdZeroCheckpointError(
            file=folder,
            reason=f"can't be written: {error.strerror or error}",
            fix="Free some space, or choose another folder. What was there before is unchanged",
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
