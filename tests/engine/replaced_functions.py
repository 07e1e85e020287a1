"""Prints which functions and attributes of torch are others after a training than before.

`python -m tests.engine.replaced_functions` prints what was found, and what spmdzero notes, as JSON.
"""

import json
import sys
import types
import warnings
from typing import Any

import torch
import torch._dynamo  # It replaces torch.manual_seed itself, and torch_xla imports it.
import torch.distributed
import torch.nn.functional
import torch.utils.checkpoint
import torch.utils.data

# What is found is compared with torch as it was before spmdzero was imported, which explains CUDA's
# errors from its import on.
assert "spmdzero" not in sys.modules

# Their methods are those of a base in C++ until one is replaced.
_OF_C = ("torch.Tensor", "torch.storage.UntypedStorage")

_Found = dict[tuple[str, str], Any]


def _of_torch() -> _Found:
    """All attributes of torch's modules and classes, by owner and name."""
    found: _Found = {}
    for name, module in list(sys.modules.items()):
        if (name + ".").startswith("torch.") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    owner = f"{value.__module__}.{value.__qualname__}"
                    found |= {(owner, key): held for key, held in vars(value).items()}
    return found


def _replaced(before: _Found, after: _Found) -> list[str]:
    owners = {owner for owner, _ in before}
    return sorted(
        f"{owner}.{name}"
        for (owner, name), value in after.items()
        if owner in owners and callable(value) and before.get((owner, name)) is not value
        # A method of a class, as Tensor.to, may have been that of its base.
        and not _of_torch_xla(value) and ((owner, name) in before or owner in _OF_C)
        # Where torch keeps a class of its own from its first look for it on.
        and not (isinstance(value, type) and before.get((owner, name)) is None)
    )  # fmt: skip


def _of_torch_xla(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch_xla")


def _trained() -> None:
    from tests.support.engines import Mean, start

    engine = start(Mean())
    loss = engine(torch.ones(8, 4))
    engine.backward(loss)
    engine.step()
    str(loss)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    before = _of_torch()
    _trained()
    from spmdzero._replaced import REPLACED

    print(json.dumps({"found": _replaced(before, _of_torch()), "noted": REPLACED}))
