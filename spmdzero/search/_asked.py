"""Reads the user's JSON, of which every key that is there is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from spmdzero.backend import map_tensors
from spmdzero.config import load_config, read, with_stand_ins
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.plan import MeshSpec
from spmdzero.search._knobs import (
    ACCUMULATION,
    ALL_ROWS,
    CONTEXT,
    CONTEXT_ON_HOST,
    DEFAULTS,
    GROUP,
    MESH,
    POLICIES,
    ROWS,
    STAGE,
    with_keys,
)

AUTO = "auto"
_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4}}
# Values that the search doesn't try itself: what has one keeps it, and its knob its default.
_TRIED = {
    "spmd.recompute": (*POLICIES, CONTEXT.policy, CONTEXT_ON_HOST.policy),
    "spmd.xla_flags": ("none", "auto"),
    "spmd.attention": ("auto", "plain"),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A JSON that leaves knobs open, with the batch of a step.

    Attributes:
        given: the JSON as it was written, without the knobs that are searched.
        config: the same without "auto", and with an optimizer.
        kept: dotted key -> value of each knob that the JSON names, which every candidate has.
        said: the same as they were written.
        batch: the inputs of one forward.
        batch_rows: number of rows of `batch`.
        rows: number of rows of a step on all devices.
        tokens: number of tokens of a row; of inputs that are no integers it is 1, the row itself.
        counted: ``"token"`` or ``"row"``.
        notes: how it was read.
    """

    given: Mapping[str, Any]
    config: Mapping[str, Any]
    kept: Mapping[str, Any]
    said: Mapping[str, Any]
    batch: Any
    batch_rows: int
    rows: int
    tokens: int
    counted: str
    notes: tuple[str, ...]

    def on(self, devices: int) -> "Asked":
        """The same with the JSON's mesh written as candidates for so many devices write theirs.

        Raises:
            SpmdZeroConfigError: the mesh doesn't fit so many devices.
        """
        kept = dict(self.kept)
        if MESH in kept:
            found = MeshSpec.resolve(kept[MESH], device_count=devices)
            kept[MESH] = {"fsdp": -1, **{n: s for n, s in found.axes if n != "fsdp" and s > 1}}
        if kept.get(GROUP, 1) >= devices:
            kept[GROUP] = 1
        return replace(self, kept=kept)

    def allows(self, keys: Mapping[str, Any]) -> bool:
        """Whether these values are none other than those that the JSON names."""
        return all(
            keys.get(key, DEFAULTS.get(key)) == (DEFAULTS[key] if key in self._pinned else value)
            for key, value in self.kept.items()
        )

    @cached_property
    def _pinned(self) -> frozenset[str]:
        """The kept knobs whose value no candidate has, such as a recompute by module name."""
        return frozenset(
            k for k, tried in _TRIED.items() if self.kept.get(k, tried[0]) not in tried
        )

    def config_of(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The config of a candidate with these values, for an engine."""
        return with_keys(self.config, self.keys_of(keys))

    def json_of(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of a candidate with these values, for the user: what he wrote stays."""
        return with_keys(self.given, self.keys_of(keys))

    def keys_of(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """A candidate's values, with those that the JSON names as it has them."""
        return {**keys, **self.said}

    def batch_of(self, rows: int) -> Any:
        """The inputs with so many rows, on the meta device: only their shapes count."""

        def resized(_: str, leaf: torch.Tensor) -> torch.Tensor:
            if leaf.dim() == 0 or leaf.shape[0] != self.batch_rows:
                return leaf.to("meta")
            return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

        return map_tensors(self.batch, resized)


_SEARCHED = (STAGE, ROWS, ACCUMULATION, *DEFAULTS)


def asked_for(config: Any, batch: Any, *, global_batch: int | None) -> Asked:
    """Reads what the user wrote.

    Args:
        config: a DeepSpeed JSON, or its dict. A knob that is "auto" or absent is searched.
        batch: the inputs of one forward.
        global_batch: rows of a step on all devices; None to take them from the JSON, or where it
            doesn't say, the rows of `batch`.

    Raises:
        SpmdZeroConfigError: the JSON's own batch sizes and `global_batch` contradict each other, or
            as in `load_config`.
        SpmdZeroUsageError: the batch has no tensors, or `global_batch` is below 1.
    """
    given = read(config)
    said, bare = _taken_out(given)
    kept = {key: _plain(key, value) for key, value in said.items()}
    filled, read_as = with_stand_ins(bare)
    notes = [f'"auto": {key} is read as {value}' for key, value in read_as.items()
             if key.startswith(("bf16", "fp16"))]  # fmt: skip
    if "optimizer" not in filled:
        filled["optimizer"] = _OPTIMIZER
        notes.append("no optimizer is named: AdamW is counted, with its two moments")
    total = filled.pop(ALL_ROWS, None)
    # The mesh and the batch are checked beside each other, with every candidate.
    alone = {key: value for key, value in kept.items() if key != ACCUMULATION}
    load_config(with_keys(filled, {ROWS: 1, **alone}))
    shapes: list[torch.Tensor] = []
    map_tensors(batch, lambda _, tensor: shapes.append(tensor) or tensor)
    if not shapes:
        raise SpmdZeroUsageError(
            "the batch has no tensors: name a shape for each input, such as --batch 8x1024:int64"
        )
    first = next((t for t in shapes if not t.is_floating_point() and t.dim() > 1), None)
    rows, why = _rows(kept, total, shapes[0].shape[0], global_batch)
    if why:
        notes.append(why)
    if AUTO in (given.get(ROWS), given.get(ACCUMULATION)):
        notes.append(
            "a Trainer's arguments have to say what the JSON does: per_device_train_batch_size and "
            "gradient_accumulation_steps"
        )
    return Asked(
        given=bare, config=filled, kept=kept, said=said, rows=rows, batch=batch,
        batch_rows=shapes[0].shape[0],
        tokens=1 if first is None else first.shape[1],
        counted="row" if first is None else "token", notes=tuple(notes),
    )  # fmt: skip


def _taken_out(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The knobs that a config names, and the config without any."""
    bare = {
        key: dict(value) if key in ("spmd", "zero_optimization") and isinstance(value, dict)
        else value
        for key, value in given.items()
    }  # fmt: skip
    said = {}
    for key in _SEARCHED:
        section, _, name = key.rpartition(".")
        holder = bare.get(section) if section else bare
        if not isinstance(holder, dict) or name not in holder:
            continue
        value = holder.pop(name)
        # "auto" of flags and attention are values of their own.
        searched = value == AUTO and key not in _TRIED
        if not searched and not _is_fit(value):
            said[key] = value
    return said, bare


def _is_fit(value: Any) -> bool:
    return value == "fit" or (isinstance(value, dict) and "fit" in value)


def _plain(key: str, value: Any) -> Any:
    if key.startswith("zero_optimization.offload_"):
        device = value.get("device", "none") if isinstance(value, dict) else "none"
        return {"device": device}
    return value


def _rows(
    kept: Mapping[str, Any], total: Any, batch_rows: int, global_batch: int | None
) -> tuple[int, str]:
    """Rows of a step on all devices, and where they come from if that isn't said anywhere."""
    if global_batch is not None and global_batch < 1:
        raise SpmdZeroUsageError(
            f"--global-batch {global_batch}: write the rows of a step, 1 or more"
        )
    if global_batch is not None and total not in (None, AUTO, global_batch):
        raise SpmdZeroConfigError(
            key=ALL_ROWS,
            value=total,
            reason=f"and --global-batch is {global_batch}",
            fix=f"Leave one of them out, or --set {ALL_ROWS}={global_batch}.",
        )
    if global_batch is not None:
        return global_batch, ""
    if total not in (None, AUTO):
        return int(total), ""
    steps = kept.get(ACCUMULATION, 1)
    said = f"a step has {batch_rows * steps} rows, those of the batch"
    return batch_rows * steps, f"{said} x {steps} (--global-batch says otherwise)"
