"""Labels that a script left on the CPU, beside an engine's outputs on the devices."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.engines import start


@pytest.mark.parametrize("shape", [(), (3,)], ids=["of rows", "of rows' places"])
def test_a_loss_outside_of_the_model_takes_labels_from_the_cpu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Conv1d(4, 5, 1) if shape else nn.Linear(4, 5)
    plain = copy.deepcopy(model)
    engine = start(model, gradient_clipping=0.0)
    rows = engine.dp_world_size
    x, labels = torch.randn(rows, 4, *shape), torch.randint(0, 5, (rows, *shape))
    loss = F.cross_entropy(engine(x), labels)
    engine.backward(loss)
    expected = F.cross_entropy(plain(x), labels)
    # A mean of 8 or 24 fp32 numbers.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    engine.step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    expected.backward()
    optimizer.step()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
