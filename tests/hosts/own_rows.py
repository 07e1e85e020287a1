"""Trains and evaluates as scripts of DeepSpeed's do: the loss is computed outside of the model.

Each host computes it from its own rows and labels, and prints what it sees.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import spmdzero
from spmdzero.backend import counters, runtime
from spmdzero.backend.jax.graph._execute import compilations

WORDS, LENGTH, WIDTH, MICRO = 19, 7, 24, 2
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Output:
    """What a model of transformers' returns."""

    logits: torch.Tensor
    balance: torch.Tensor


class Words(nn.Module):
    """Returns logits of each place, and a scalar, in the container that is asked for."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.odd = nn.Linear(WIDTH, 61, bias=False)
        self.last = nn.Linear(61, WORDS)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = torch.tanh(self.odd(self.embed(ids)))
        logits, balance = self.last(hidden), hidden.float().square().mean()
        if self.container == "tensor":
            return logits
        made = {"logits": logits, "balance": balance}
        return Output(**made) if self.container == "dataclass" else made


def engine_of(case: dict[str, Any], **more: Any) -> tuple[spmdzero.Engine, Any]:
    """A new engine of a case, and its loader."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "spmd": {"min_shard_elements": 128},
        **case.get("config", {}),
    }
    model = Words(case.get("container", "tensor"))
    engine, _, loader, _ = spmdzero.initialize(model=model, config=config, **more)
    return engine, loader


def rows(step: int, micro: int = MICRO) -> Batch:
    """This host's rows and their labels; those of all are the same anywhere."""
    generator = torch.Generator().manual_seed(step)
    whole = micro * runtime.device_count()
    ids = torch.randint(0, WORDS, (whole, LENGTH), generator=generator)
    mine = ids.chunk(runtime.process_count())[runtime.process_index()]
    return mine, (mine * 7 + 3) % WORDS


def loss_of(case: dict[str, Any], engine: spmdzero.Engine, output: Any, labels: Any) -> Any:
    """What the script computes outside of the model."""
    logits = output if isinstance(output, torch.Tensor) else None
    if logits is None:
        named = output if isinstance(output, dict) else vars(output)
        logits = named["logits"]
    labels = labels.to(engine.device)
    cut = logits[:, :-1].reshape(-1, WORDS).float(), labels[:, 1:].reshape(-1)
    loss = F.cross_entropy(*cut, reduction=case.get("reduction", "mean"))
    if logits is not output:
        loss = loss + 0.1 * named["balance"]
    if case.get("penalty"):
        loss = loss + 1e-3 * engine.module.last.weight.square().sum()
    return loss


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of this host by step, weights, how the steps were compiled, and what one sends."""
    engine, _ = engine_of(case)
    losses, compiled = [], []
    for step in range(case["steps"]):
        loss = trained_on(case, engine, rows(step))
        losses.append(loss.item())
        compiled.append(counters.compiled()[0])
    return {
        "losses": losses,
        "weights": [p.detach().cpu().double().sum().item() for p in engine.module.parameters()],
        "compiled": compiled,
        "folded": engine.capture.replayed,
        "sent": sent_by(case, engine) if case.get("sent") else [],
    }


def sent_by(case: dict[str, Any], engine: spmdzero.Engine) -> list[list[Any]]:
    """What one more step sends: role, bytes, and bytes between hosts."""
    with spmdzero.record_ledgers(engine) as ledgers:
        trained_on(case, engine, rows(case["steps"]))
    return [[c.role, c.bytes, c.host_bytes] for c in ledgers.boundary.collectives]


def trained_on(case: dict[str, Any], engine: spmdzero.Engine, batch: Batch) -> torch.Tensor:
    """The loss of a micro-batch that was trained on."""
    ids, labels = batch
    output = engine(ids.to(engine.device) if case.get("moved") else ids)
    loss = loss_of(case, engine, output, labels)
    if case.get("plain"):
        loss.backward()
    else:
        engine.backward(loss)
    engine.step()
    return loss


def loaded(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of two epochs of the engine's own loader, whose last micro-batch lacks rows."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, WORDS, (44, LENGTH), generator=generator)
    data = TensorDataset(ids, (ids * 7 + 3) % WORDS)
    engine, loader = engine_of(case, training_data=data)
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        losses += [trained_on(case, engine, batch).item() for batch in loader]
    return {"losses": losses}


def batches_to_evaluate() -> Iterator[Batch]:
    """The last one is smaller."""
    yield rows(100)
    yield rows(101)
    yield rows(102, MICRO // 2)


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    """Metrics of this host's rows, after some steps: on the devices, and as numbers."""
    engine, _ = engine_of(case)
    for step in range(case["steps"]):
        trained_on(case, engine, rows(step))
    engine.eval()
    right = torch.zeros((), dtype=torch.int64, device=engine.device)
    seen, loss, shown = 0, 0.0, ""
    with torch.no_grad():
        for ids, labels in batches_to_evaluate():
            logits = engine(ids)
            guessed = logits.argmax(-1)
            right += (guessed == labels.to(engine.device)).sum()
            seen += guessed.numel()
            loss += loss_of(case, engine, logits, labels).item() * len(guessed)
            shown = str(guessed[0].tolist())
    found = {"right": right.item(), "seen": seen, "loss": loss, "first": shown}
    total = right.clone()
    spmdzero.comm.all_reduce(total)
    return found | {"by comm": int(total), "text": f"{right}"}


def refuse(case: dict[str, Any]) -> dict[str, Any]:
    """What is said of a value of this host's that would become one of all hosts."""
    engine, _ = engine_of(case)
    ids, labels = rows(0)
    loss = loss_of(case, engine, engine(ids), labels)
    bias, said = engine.module.last.bias, {}

    def assign() -> None:
        bias.data = bias.data + loss.detach()

    ways = {"add": lambda: bias.data.add_(loss.detach()), "assign": assign}
    ways["copy"] = lambda: bias.data.copy_(torch.ones(WORDS).to(engine.device))
    for name, write in ways.items():
        try:
            write()
            said[name] = ""
        except spmdzero.SpmdZeroError as error:
            said[name] = str(error)
    bias.data.copy_(torch.full((WORDS,), 2.0))
    return {"said": said, "written": bias.sum().item()}


class Scaled(nn.Module):
    """Reads a tensor of the script's and an input that is no batch; says what each device has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mask = Words("tensor"), None

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.words(ids) * self.mask.float() * scale
        return {"logits": logits, "each": logits.mean((0, 1))}


def scaled(case: dict[str, Any]) -> dict[str, Any]:
    """Losses where tensors that the script moved are no batches, and an output is stacked."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "spmd": {"min_shard_elements": 128, "outputs": {"each": "stack"}},
    }
    engine, *_ = spmdzero.initialize(model=Scaled(), config=config | case["config"])
    engine.module.mask = (torch.arange(WORDS) % 3).to(engine.device)
    losses = []
    for step in range(case["steps"]):
        ids, labels = rows(step)
        made = engine(ids, torch.tensor(0.5).to(engine.device))
        loss = loss_of(case, engine, made["logits"], labels) + made["each"].square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses}


def direct(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of a module that is called without its engine, whose gradients are used."""
    engine, _ = engine_of(case)
    losses = []
    for step in range(case["steps"]):
        ids, labels = rows(step)
        loss = loss_of(case, engine, engine.module(ids.to(engine.device)), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses}


def evaluate_alone(case: dict[str, Any]) -> dict[str, Any]:
    """Counts what this host has of batches of 8, 5 and 3 rows, of which another has others."""
    engine, _ = engine_of(case)
    trained_on(case, engine, rows(0))
    engine.eval()
    shared = {1: [(8, 5, 3)], 2: [(8, 5), (3,)], 4: [(8,), (5,), (3,), ()]}
    each, rank = shared[runtime.process_count()], runtime.process_index()
    mine, start = each[rank], sum(map(sum, each[:rank]))
    ids = torch.randint(0, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(5))
    right = torch.zeros((), dtype=torch.int64, device=engine.device)
    sums, places = [], set[int]()
    for count in mine:
        some = ids[start : start + count]
        start += count
        with torch.no_grad():
            logits = engine.module(some.to(engine.device))
        labels = ((some * 7 + 3) % WORDS).to(engine.device)
        right += (logits.argmax(-1) == labels).sum()
        sums.append(logits.double().abs().sum().item())
        places |= hosts_of_latest_program()
    own = right.item()
    total = right.clone()
    spmdzero.comm.all_reduce(total)
    # They are together again.
    after = trained_on(case, engine, rows(1)).item()
    return {
        "own": own, "sums": sums, "total": int(total), "losses": [after], "places": [*places],
    }  # fmt: skip


def hosts_of_latest_program() -> set[int]:
    """Whose devices run the program that was compiled last."""
    *_, latest = compilations._kept.values()
    shardings = jax.tree_util.tree_leaves(latest.compiled.input_shardings)
    return {device.process_index for sharding in shardings for device in sharding.device_set}


WAYS = {
    "alone": evaluate_alone,
    "scaled": scaled,
    "direct": direct,
    "train": train,
    "load": loaded,
    "evaluate": evaluate,
    "refuse": refuse,
}


def main() -> None:
    cases = json.loads(sys.argv[1])
    print(json.dumps({name: WAYS[case["way"]](case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
