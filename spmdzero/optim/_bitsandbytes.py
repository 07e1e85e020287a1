"""Optimizers of bitsandbytes, recognised without its import: their states may rest in 8 bits."""

from collections.abc import Container
from typing import Any, NoReturn

import torch

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._adam import Adam
from spmdzero.optim._lion import Lion
from spmdzero.optim._rule import UpdateRule

_MODULE = "bitsandbytes.optim"


def rule_of_bitsandbytes(optimizer: Any) -> UpdateRule | None:
    """The rule of an optimizer of bitsandbytes 0.50, None if it is of another library.

    Its Adam, AdamW and Lion are known, in 8 and in 32 bits. A paged one is the same: whether states
    rest on the host is the config's ``offload_optimizer``.

    Raises:
        SpmdZeroConfigError: another of its classes, or what the rule has not.
    """
    cls = type(optimizer)
    if not cls.__module__.startswith(_MODULE):
        return None
    args, kind = optimizer.args, optimizer.optimizer_name
    for unknown in ("max_unorm", "skip_zeros"):
        if getattr(args, unknown, 0):
            _refuse(cls, f"{unknown} has no part in the sharded update", f"Leave {unknown} out.")
    least = args.min_8bit_size if args.optim_bits == 8 else None
    if kind == "adam":
        # Its decay acts on the weights, of Adam as of AdamW.
        return Adam(decoupled=True, bias_correction=True, eight_bits_from=least)
    if kind == "lion":
        return Lion(eight_bits_from=least)
    _refuse(
        cls,
        f"of bitsandbytes' optimizers {kind!r} has no sharded update here",
        "Use its AdamW, Adam or Lion (of any of their names, such as AdamW8bit), or AdamW of "
        "torch.optim.",
    )


def kept_in_fp32(optimizer: Any, *, placed: Container[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters whose states its GlobalOptimManager keeps in 32 bits, as Trainer's embeddings.

    Args:
        optimizer: of any library.
        placed: the parameters that are on the devices, in the place of the optimizer's.

    Raises:
        SpmdZeroConfigError: it overrides something else.
    """
    if not type(optimizer).__module__.startswith(_MODULE):
        return []
    manager = optimizer.mng
    members = [p for group in optimizer.param_groups for p in group["params"]]
    told = [(p, manager.pid2config[id(p)]) for p in members if id(p) in manager.pid2config]
    own = {id(p) for p in members}
    for module, name, what in manager.module_weight_config_triple:
        # It is one manager for all models of a process.
        if id(parameter := getattr(module, name)) in own or parameter in placed:
            told.append((parameter, what))
    for _, what in told:
        if what != {"optim_bits": 32}:
            _refuse(
                type(optimizer),
                f"GlobalOptimManager overrides {what} for some parameters",
                'Override {"optim_bits": 32} alone; other numbers are those of a param group.',
            )
    return [parameter for parameter, _ in told]


def _refuse(cls: type, reason: str, fix: str) -> NoReturn:
    raise SpmdZeroConfigError(
        key="optimizer", value=f"{cls.__module__}.{cls.__qualname__}", reason=reason, fix=fix
    )
