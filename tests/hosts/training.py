"""Trains one case after another and prints their losses: one host of some, or the only one."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import spmdzero
from spmdzero.backend import arrays, runtime

WIDTH, MICRO = 24, 2


class Model(nn.Module):
    """One weight that is split by a dim, one that is flattened, one that stays whole."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 64)
        self.dropout = nn.Dropout(dropout)
        self.odd = nn.Linear(64, 61, bias=False)
        self.last = nn.Linear(61, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(F.gelu(self.wide(x.to(self.wide.weight.dtype))))
        return F.mse_loss(self.last(torch.tanh(self.odd(hidden))).float(), y)


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """The config of a case."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        **case.get("config", {}),
    }
    return config | {"spmd": {"min_shard_elements": 128, **config.get("spmd", {})}}


def rows(step: int, micro: int = MICRO) -> tuple[torch.Tensor, ...]:
    """This host's rows of a micro-batch, `micro` a device; those of all are the same anywhere."""
    generator = torch.Generator().manual_seed(step)
    mine = micro * runtime.local_device_count()
    first = runtime.process_index() * mine
    whole = micro * runtime.device_count()
    made = [torch.randn(whole, WIDTH, generator=generator) for _ in range(2)]
    return tuple(tensor[first : first + mine] for tensor in made)


def dataset() -> TensorDataset:
    """Rows of which the last micro-batch of an epoch lacks some."""
    generator = torch.Generator().manual_seed(9)
    return TensorDataset(*(torch.randn(44, WIDTH, generator=generator) for _ in range(2)))


def by_loader(case: dict[str, Any]) -> tuple[spmdzero.Engine, list[float]]:
    """Losses of two epochs of the engine's own loader, each with an evaluation of fewer rows."""
    torch.manual_seed(0)
    model = Model(case.get("dropout", 0.0))
    engine, _, loader, _ = spmdzero.initialize(
        model=model, config=config_of(case), training_data=dataset()
    )
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        engine.train()
        for batch in loader:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            losses += [engine(*batch).item() for batch in (rows(7), rows(epoch, MICRO // 2))]
    return engine, losses


def engine_of(case: dict[str, Any]) -> spmdzero.Engine:
    """A new engine of a case."""
    torch.manual_seed(case.get("seed", 0))
    model = Model(case.get("dropout", 0.0))
    return spmdzero.initialize(model=model, config=config_of(case))[0]


def step_of(engine: spmdzero.Engine, step: int, case: dict[str, Any]) -> float:
    """The mean loss of a step's micro-batches, by `train_batch` or by the three calls."""
    count = engine.gradient_accumulation_steps()
    batches = [rows(step * count + index) for index in range(count)]
    if case.get("style") != "three calls":
        return float(engine.train_batch(iter(batches)))
    losses = []
    # One host computes something for itself.
    looks = step == case.get("first_looks") and runtime.process_index() == 0
    for batch in batches:
        loss = engine(*batch)
        looked = loss.detach() * 3 if looks else None
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        assert looked is None or abs(looked.item() - losses[-1] * 3) < 1e-6
    return sum(losses) / count


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    """What a host sees of a case."""
    if case.get("style") == "loader":
        engine, losses = by_loader(case)
        return {"losses": losses, "weights": sums(engine), "world": engine.dp_world_size}
    engine = engine_of(case)
    if "load" in case:
        engine.load_checkpoint(case["load"])
    losses, norms = [], []
    for step in range(case.get("first", 0), case["steps"]):
        losses.append(step_of(engine, step, case))
        norms.append(float(engine.get_global_grad_norm()))
        if step + 1 == case.get("save_after"):
            engine.save_checkpoint(case["save"])
            export(engine, case.get("export"))
    moved = moved_by(engine, case) if "mesh" in case.get("config", {}).get("spmd", {}) else []
    result = {"losses": losses, "weights": sums(engine), "world": engine.dp_world_size}
    repeated = engine.capture.ends.repeated
    return result | {
        "norms": norms, "moved": moved, "on_host": on_host(engine), "repeated": repeated
    }  # fmt: skip


def on_host(engine: spmdzero.Engine) -> list[str]:
    """Names of the tensors of the state that rest in the host's memory."""
    named = engine.named_tensors()
    there = zip(named, arrays.are_on_host([*named.values()]), strict=True)
    return [name for name, rests in there if rests]


def sums(engine: spmdzero.Engine) -> dict[str, float]:
    """That of each weight's elements."""
    state = engine.module.state_dict()
    return {name: tensor.cpu().double().sum().item() for name, tensor in state.items()}


def export(engine: spmdzero.Engine, folder: str | None) -> None:
    """Writes what other programs read, and what can't be written, which all must come to know."""
    if folder is None:
        return
    engine.save_16bit_model(folder)
    engine.save_deepspeed_checkpoint(folder)
    engine.save_deepspeed_checkpoint(folder, universal=False, ranks=4)
    with warnings.catch_warnings():
        # torch warns about its own code.
        warnings.simplefilter("ignore")
        dcp.save(engine.distributed_state().state_dict(), checkpoint_id=Path(folder, "torch's"))
    file = Path(folder, "a file")
    if runtime.process_index() == 0:
        file.write_text("")
    try:
        engine.save_16bit_model(file / "no folder")
    except spmdzero.SpmdZeroError as error:
        Path(folder, f"refused {runtime.process_index()}").write_text(str(error))


def moved_by(engine: spmdzero.Engine, case: dict[str, Any]) -> list[list[Any]]:
    """What one more step sends: role, kind, devices of a group, of a device, between hosts."""
    with spmdzero.record_ledgers(engine) as ledgers:
        step_of(engine, case["steps"], case)
    return [
        [c.role, c.kind_and_slice, c.group_size, c.wire_bytes, c.host_bytes]
        for c in ledgers.boundary.collectives
    ]


def main() -> None:
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: result_of(case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
