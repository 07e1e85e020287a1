"""Buffers that stay in fp32 beside parameters of half precision."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def keep_in_fp32(model: nn.Module, asked: Sequence[str], *, dtype: torch.dtype) -> None:
    """Casts the floating buffers whose names match to fp32, in place; others keep their dtypes.

    Args:
        model: the module.
        asked: patterns in which * is anything, each of which may match anywhere in a buffer's name;
            or "auto" for those of transformers' `_keep_in_fp32_modules_strict`, and under fp16
            of `_keep_in_fp32_modules`.
        dtype: of the parameters, bf16 or fp16.

    Source: DeepSpeed, runtime/keep_in_fp32.py.
    """
    patterns = {*_named_by(model, dtype)} if asked == "auto" else {*map(_as_regex, asked)}
    if not patterns:
        return
    kept = re.compile("|".join(sorted(patterns)))
    named = list(model.named_buffers(remove_duplicate=False))
    cast = {
        id(buffer): buffer.float()
        for name, buffer in named
        if buffer.is_floating_point() and buffer.dtype.itemsize == 2 and kept.search(name)
    }
    for name, buffer in named:
        if id(buffer) in cast:
            holder, _, own = name.rpartition(".")
            model.get_submodule(holder)._buffers[own] = cast[id(buffer)]


def _named_by(model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    lists = ["_keep_in_fp32_modules_strict"]
    if dtype == torch.float16:
        lists.append("_keep_in_fp32_modules")
    for at, part in model.named_modules():
        for each in lists:
            names: Any = getattr(part, each, None)
            for pattern in map(_as_regex, names or ()):
                yield rf"^{re.escape(at)}\..*{pattern}" if at else pattern


def _as_regex(name: str) -> str:
    return name.replace("*", ".*")
