"""Trains on texts whose lengths differ from host to host, and prints lengths and losses.

With one process the rows of both hosts are one batch, which is as long as the longest of them.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import runtime

# The rows of each step: two hosts with two devices each.
STEPS = [(20, 9, 31, 17), (64, 12, 70, 3), (5, 6, 7, 8), (100, 90, 20, 130), (20, 9, 31, 17)]


class Words(nn.Module):
    """Predicts each word by the one before it; its loss leaves out labels of -100."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        logits = self.last(torch.tanh(self.embed(input_ids)) * attention_mask[..., None])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def collated(lengths: tuple[int, ...], first: int) -> dict[str, torch.Tensor]:
    """Rows as a collator leaves them, as long as the longest; row i has words of its own."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    words = (torch.arange(max(lengths)) * torch.tensor([[7], [11], [13], [17]])) % 49 + 1
    ids = words[first : first + len(lengths)].masked_fill(~mask, 0)
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def main() -> None:
    """Trains a step on each batch."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "spmd": {"min_shard_elements": 16},
    }
    engine, *_ = spmdzero.initialize(model=Words(), config=config)
    rows = 4 // runtime.process_count()
    first = rows * dist.get_rank()
    batches = [collated(lengths[first : first + rows], first) for lengths in STEPS]
    found: list[tuple[int, float]] = []
    for batch in spmdzero.data.PadToLengths(batches):
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        found.append((batch["input_ids"].shape[1], loss.item()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
