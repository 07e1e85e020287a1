"""The rule of a torch optimizer of any class, proven elementwise."""

import functools
from typing import Any

import torch

from spmdzero.config import REFUSED_OPTIMIZERS
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._elementwise import ELEMENTS_MEET, TorchElementwise, on_state, proven
from spmdzero.optim._first_step import first_step_apart
from spmdzero.optim._group_checks import refuse_options, refuse_tensors
from spmdzero.optim._initial_state import refuse

# Other libraries' classes that treat a parameter as a whole -> the config's name of their kind.
_IN_CONFIG = {"lamb": "Lamb", "muon": "Muon"}


def elementwise_rule(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], *, device: torch.device
) -> TorchElementwise:
    """The rule for one param group of a torch optimizer of any class, see `proven`.

    Raises:
        SpmdZeroConfigError: the class is known not to be elementwise, or fails the proof.
    """
    name = type(optimizer).__name__
    known = REFUSED_OPTIMIZERS.get("torch.optim.muon" if name == "Muon" else name.lower())
    if known is not None and type(optimizer).__module__.startswith("torch.optim"):
        refuse(optimizer, known.reason, fix=known.fix)
    refuse_tensors(group)
    refuse_options(group, ("differentiable",))
    # Not every class with the switch can use it on this device.
    attempts = [
        functools.partial(on_state, optimizer, capturable=capturable)
        for capturable in ([True, False] if "capturable" in group else [False])
    ]
    failures = []
    for make in (*attempts, functools.partial(first_step_apart, optimizer)):
        try:
            return proven(make, optimizer, group, device=device)
        except SpmdZeroConfigError as failure:
            failures.append(failure)
    meets = next((f for f in failures if ELEMENTS_MEET in f.reason), None)
    failure = failures[-1] if meets is None else meets
    instead = _IN_CONFIG.get(name.lower())
    if instead is None:
        raise failure
    refuse(
        optimizer,
        failure.reason.partition(": ")[2],
        fix=f'Name the config\'s own in its place: "optimizer": {{"type": "{instead}"}}.',
    )
