"""Writes a training state that a run of DeepSpeed can continue."""

import contextlib
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats.deepspeed._flat import Partition
from spmdzero.formats.deepspeed._host import loss_scaler
from spmdzero.formats.deepspeed._model_file import model_file
from spmdzero.formats.deepspeed._pickled_classes import FragmentAddress, ZeroStageEnum
from spmdzero.formats.deepspeed._pickles import write_pt
from spmdzero.formats.deepspeed._rank_files import rank_file
from spmdzero.formats.deepspeed._read import recognises
from spmdzero.formats.deepspeed._target import VERSION, Target
from spmdzero.formats.deepspeed._universal import GLOBAL_STATE, STATES


def write_regular(target: Target, folder: Path) -> None:
    """Writes the files that the ranks of `target` would have written at its stage.

    DeepSpeed loads them by `engine.load_checkpoint` with exactly that number of ranks. Only one
    rank's part of the states is in memory at a time.

    Args:
        target: the state and the run.
        folder: `<save_dir>/<tag>`; it appears when it is complete, and replaces one of that name.

    Raises:
        SpmdZeroCheckpointError: no space, no permission, or `folder` holds something else.
    """
    prefix = "bf16_" if target.bf16 else ""
    with _appearing(folder) as new:
        for part in target.parts():
            mine = part.model_rank
            if part.stage < 3:
                write_pt(part.model_file(), new / model_file(mine))
            for rank in range(part.ranks):
                if part.stage == 3:
                    name = rank_file(rank, states="model", model_rank=mine)
                    write_pt(part.model_file_of(rank), new / name)
                name = prefix + rank_file(rank, model_rank=mine)
                write_pt(_optimizer_file(part, rank), new / name)


def write_universal(target: Target, folder: Path) -> None:
    """Writes DeepSpeed's universal format: a folder per parameter, with whole tensors.

    DeepSpeed loads it with any number of ranks, at any stage, by
    ``"checkpoint": {"load_universal": true}``. Only one tensor is in memory at a time, apart from
    the module's weights.

    Args and Raises: as `write_regular`.
    """
    with _appearing(folder) as new:
        for part in target.parts():
            rank = part.model_rank
            write_pt(part.model_file(), new / model_file(rank))
            # DeepSpeed's stage 3 reads the counters from this file.
            name = rank_file(0, states="model", model_rank=rank)
            write_pt(part.model_file_of(0), new / name)
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
        shared = _global_state(target) | _base_optimizer(target, [dict(target.step)])
        shared["param_groups"] = shared["optimizer_state_dict"]["param_groups"]
        write_pt(shared, new / STATES / GLOBAL_STATE)


def _optimizer_file(target: Target, rank: int) -> dict[str, Any]:
    """The content of one rank's file (DeepSpeed, `state_dict` of each stage's optimizer)."""
    parts = [group.partition(rank, target.ranks) for group in target.flat]
    masters = [part.filled({n: target.master(n) for n in part.shapes}) for part in parts]
    base = _base_optimizer(target, [_states(target, part) for part in parts])
    if target.stage == 3:
        content = base | {"fp32_flat_groups": masters}
    else:
        content = {
            "base_optimizer_state": base["optimizer_state_dict"],
            # The weights don't have the padding at the end, but the states do.
            "single_partition_of_fp32_groups": [
                master[: part.used].clone() for part, master in zip(parts, masters, strict=True)
            ],
            "group_paddings": [part.size - part.used for part in parts],
            "param_slice_mappings": [
                OrderedDict(
                    (name, FragmentAddress(numel=stop - start, start=place))
                    for name, start, stop, place in part.pieces
                )
                for part in parts
            ],
        }
    return {
        "optimizer_state_dict": _global_state(target) | content,
        "ds_config": dict(target.config),
        "ds_version": VERSION,
    }


def _states(target: Target, part: Partition) -> dict[str, Any]:
    """The states of one flat tensor."""
    tensors = target.state.tensors
    slots = target.slots.get(next(iter(part.shapes)), ())
    # A step without further states would keep torch's optimizers from making their own.
    states: dict[str, Any] = dict(target.step) if slots else {}
    for slot in slots:
        stored = {name: tensors[f"{slot}/{name}"] for name in part.shapes}
        if all(tensor.shape == part.shapes[name] for name, tensor in stored.items()):
            states[slot] = part.filled(stored)
        else:
            states[slot] = next(iter(stored.values())).whole().float()
    return states


def _global_state(target: Target) -> dict[str, Any]:
    """The values that are the same in all of the optimizer's files."""
    scaler = target.state.host.scaler
    state: dict[str, Any] = {
        "overflow": False,
        "zero_stage": ZeroStageEnum(target.stage),
        "ds_version": VERSION,
    }
    if target.stage == 3:
        state["partition_count"] = target.ranks
    else:
        state["partition_count"] = [target.ranks for _ in target.flat]
        state["param_alignment_paddings"] = [[0] * len(group.shapes) for group in target.flat]
    if scaler is None and target.stage < 3:
        return state  # DeepSpeed keeps the scaler of its config, except at stage 3
    record = loss_scaler(scaler)
    return state | {"loss_scaler": record, "dynamic_loss_scale": record.dynamic}


def _base_optimizer(target: Target, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """torch's state of the optimizer, for flat tensors with these `states`."""
    groups, first = [], 0
    for group, layouts in zip(target.groups, target.layouts, strict=True):
        # DeepSpeed's own Adam needs the key; torch's doesn't have it and ignores it.
        more = {"bias_correction": True} if "betas" in group else {}
        groups.append(more | group | {"params": list(range(first, first + len(layouts)))})
        first += len(layouts)
    state = {"state": dict(enumerate(states)), "param_groups": groups}
    return {"optimizer_state_dict": state}


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder that replaces `folder` if the body succeeds, and is removed if not."""
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
