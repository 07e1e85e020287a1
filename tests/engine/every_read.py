"""Reads a replica's tensors in every way that Python has, in every place where a user's code runs.

Prints one JSON object: place -> read -> what came of it, `"value"` or the error. Run by
`test_reads.py` in a process of its own, which a read that XLA can't do would end.
"""

import copy
import io
import json
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import spmdzero

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "repr": repr,
    "print": lambda t: print(t, file=io.StringIO()),
    "format": lambda t: f"{t.mean()}",
    "format with a spec": lambda t: f"{t.mean():.3f}",
    "log": lambda t: logging.getLogger("every_read").error("%s", t),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().cpu().numpy(),
    "asarray": lambda t: np.asarray(t.detach()),
    "bool": lambda t: bool(t.sum()),
    "int": lambda t: int(t.sum()),
    "float": lambda t: float(t.sum()),
    "item": lambda t: t.sum().item(),
    "index": lambda t: range(100)[t.sum().long()],
    "slice": lambda t: t[: t.long().sum()],
    "iterate": lambda t: [float(v) for v in t.reshape(-1)],
    "in": lambda t: 3.0 in t,
    "len": len,
    "max": lambda t: max(t.reshape(-1)),
    "pickle": lambda t: pickle.dumps(t.detach()),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "copy": lambda t: copy.copy(t.detach()),
    "save": lambda t: torch.save({"t": t.detach()}, io.BytesIO()),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", torch.float64),
    "copy_": lambda t: torch.zeros(t.shape).copy_(t.detach()),
    "type": lambda t: t.type("torch.FloatTensor"),
    "tensor": lambda t: repr(torch.tensor(t)),
    "tensor of tensors": lambda t: torch.tensor([t.sum(), t.sum()]),
    "equal": lambda t: torch.equal(t, t * 1),
    "allclose": lambda t: torch.allclose(t, t + 1),
    "compare": lambda t: bool((t > 0).any()),
    "nonzero": lambda t: t.nonzero(),
    "unique": lambda t: t.unique(),
    "mask": lambda t: t[t > 0],
    "median": lambda t: t.median(),
    "empty": lambda t: repr(t[:0]),
    "data_ptr": lambda t: t.data_ptr(),
    "dlpack": lambda t: t.detach().__dlpack__(),
    "storage": lambda t: t.storage()[0],
    "untyped_storage": lambda t: bytes(t.untyped_storage()),
}
found: dict[str, dict[str, str]] = {}


def read_all(place: str, tensor: torch.Tensor) -> None:
    """Every read of `tensor`, where no reads were made in this place before."""
    if place in found:
        return
    found[place] = {}
    for name, read in READS.items():
        try:
            value = read(tensor)
            found[place][name] = value if name == "repr" else "value"
        except Exception as error:
            found[place][name] = f"{type(error).__name__}: {error}"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        read_all("Function.forward", tensor)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        read_all(f"{how} Function.backward", grads[0])
        return grads[0] * 2


class Reader(nn.Module):
    """Keeps what it computes in `kept`, a list that is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read_all(f"{how} input", x)
        y = self.layer(x)
        read_all(f"{how} forward", y)
        read_all("parameter", self.layer.weight)
        read_all("the same on all", torch.ones(2, 2, device=x.device))
        if y.requires_grad:
            y.register_hook(lambda grad: read_all(f"{how} tensor hook", grad))
        kept.append(y)
        return Doubled.apply(y).square().mean()


def main() -> None:
    """Reads in all places, and prints what came of it."""
    global how
    logging.disable(logging.CRITICAL)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }
    module = Reader()
    engine, *_ = spmdzero.initialize(model=module, config=config)
    x = torch.randn(2 * engine.mesh.size, 4)
    layer = module.layer
    layer.register_forward_pre_hook(lambda _, args: read_all("forward pre-hook", args[0]))
    layer.register_forward_hook(lambda _, args, out: read_all("forward hook", out))
    layer.register_full_backward_hook(
        lambda _, inner, outer: read_all(f"{how} backward hook", outer[0])
    )
    for how in ("train", "plain", "later"):
        loss = engine(x)
        if how == "train":
            read_all("kept, before backward", kept[-1])
        if how == "plain":
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        read_all(f"{how} kept, after step", kept[-1])
        read_all(f"{how} kept, computed with", kept[-1].detach().mean(1) + 1)
    module.eval()
    for how, around in (("no_grad", torch.no_grad()), ("inference", torch.inference_mode())):
        with around:
            read_all(f"{how} output", engine(x))
        read_all(f"{how} kept", kept[-1])
    found["end"] = {"loss": repr(loss.item())}
    print(json.dumps(found))


how = ""
kept: list[torch.Tensor] = []

if __name__ == "__main__":
    main()
