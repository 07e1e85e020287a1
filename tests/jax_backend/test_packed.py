"""Rows of several lengths in a forward: packed sequences and the CTC loss."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import spmdzero
from spmdzero.backend import Mesh
from tests.support.bounds import assert_summed

ROWS, STEPS = 3, 5


class Packed(nn.Module):
    """The mean of squares of what a recurrent layer makes of packed rows."""

    def __init__(self, kind: type[nn.RNNBase], lengths: Any, **more: Any) -> None:
        super().__init__()
        self.inner = kind(4, 6, 2, batch_first=True, bidirectional=True)
        self.lengths, self.more = lengths, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, self.lengths, batch_first=True, **self.more)
        rows, lengths = pad_packed_sequence(
            self.inner(packed)[0], batch_first=True, padding_value=0.5, total_length=STEPS + 1
        )
        return (rows.square().sum(-1) * lengths.to(x.device)[:, None]).mean()


class Ctc(nn.Module):
    """The CTC loss of each replica's rows."""

    def __init__(self, inputs: Any, targets: Any, loss: Callable[..., Any] = F.ctc_loss) -> None:
        super().__init__()
        self.line, self.lengths, self.loss = nn.Linear(4, 5), (inputs, targets), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.tensor([[1, 2], [3, 3], [4, 1]], device=x.device)
        return self.loss(self.line(x).transpose(0, 1).log_softmax(-1), labels, *self.lengths)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal": lambda: Packed(nn.GRU, [STEPS] * ROWS),
    "descending": lambda: Packed(nn.LSTM, torch.tensor([5, 3, 3])),
    "unsorted": lambda: Packed(nn.RNN, [2, 4, 1], enforce_sorted=False),
    "ctc of lists": lambda: Ctc((5, 4, 5), (2, 2, 1)),
    "ctc of tensors": lambda: Ctc(torch.tensor([5, 4, 5]), torch.tensor([2, 2, 1])),
    "torch's own ctc": lambda: Ctc(
        (5, 4, 5), (2, 2, 1), functools.partial(torch.ctc_loss, reduction=1)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_replica_trains_on_its_rows_as_torch(name: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    theirs = copy.deepcopy(model)
    engine, *_ = spmdzero.initialize(model=model, config=CONFIG)
    x = torch.randn(ROWS * engine.mesh.size, STEPS, 4)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    wanted = torch.stack([theirs(rows) for rows in x.split(ROWS)]).mean()
    wanted.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert_summed(loss.cpu(), wanted.detach())
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_summed(mine.detach().cpu(), other.detach())


CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0,
}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [([3, 5, 1], "enforce_sorted=False"), ([5] * 4, "batch_size=3"), ([6, 5, 1], "longer than")],
)
def test_wrong_lengths_are_refused_at_their_line(lengths: Any, said: str, mesh: Mesh) -> None:
    engine, *_ = spmdzero.initialize(model=Packed(nn.GRU, lengths), config=CONFIG)
    with pytest.raises(RuntimeError, match=rf"(test_packed.py|rnn.py)[\s\S]*{said}|{said}"):
        engine(torch.randn(ROWS * engine.mesh.size, STEPS, 4))
