"""`torch.inference_mode()` around a trained model: the numbers of `torch.no_grad()`.

There autograd takes no operation apart, so that a backend is handed a whole dropout or LSTM.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import current
from spmdzero.errors import SpmdZeroRuntimeError
from tests.support.engines import start, three_calls

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")


class Recurrent(nn.Module):
    """The states of `inner`, `[rows, 4, 8]`, without the last one, which isn't the rows' own."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Function(nn.Module):
    """A function of what a linear layer makes of `[rows, 4, 8]`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.line, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.line(x))


def functions(x: torch.Tensor) -> torch.Tensor:
    """Draws, and other operations that torch composes, each of `[rows, 4, 8]`."""
    y = F.alpha_dropout(x, 0.5, training=True) + F.dropout1d(x, 0.5)
    y = y + F.rrelu(x, training=True) + torch.bernoulli(x.sigmoid()) + F.gumbel_softmax(x)
    y = y + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
    z = x.clone()
    z.narrow(1, 0, 2).mul_(2)
    return y + torch.einsum("bij,bkj->bik", z, x) @ x.reshape(-1, 4, 8)


def block(*, rate: float = 0.5) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "block": block,
    "lstm": lambda: Recurrent(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5)),
    "gru": lambda: Recurrent(nn.GRU(8, 8, 2, batch_first=True, dropout=0.5)),
    "functions": lambda: Function(functions),
}
# torch_xla's GRU fails in no_grad, too: cuDNN's layout of its weights.
ON_JAX_ALONE = {"gru"}


def rows(engine: spmdzero.Engine, *, seed: int = 1) -> torch.Tensor:
    return torch.randn(engine.mesh.size, 4, 8, generator=torch.Generator().manual_seed(seed)).to(
        engine.device
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_has_no_grads_numbers_and_draws(name: str, stage: int) -> None:
    if name in ON_JAX_ALONE and current().name == "torch_xla":
        pytest.skip("torch_xla's own")
    torch.manual_seed(0)
    engine = start(
        MODELS[name](),
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )
    x = rows(engine)
    for training in (True, False):
        engine.train(training)
        with torch.no_grad():
            torch.manual_seed(3)
            expected = engine(x).cpu()
        with torch.inference_mode():
            torch.manual_seed(3)
            found = engine(x)
            assert found.is_inference()
            assert torch.equal(found.cpu(), expected), training
            assert not training or not torch.equal(engine(x).cpu(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_its_module_has_too(name: str) -> None:
    torch.manual_seed(0)
    engine = start(MODELS[name]())
    x, module = rows(engine), engine.module.eval()
    if current().name == "torch_xla":
        with torch.inference_mode(), pytest.raises(SpmdZeroRuntimeError) as refused:
            module(x)
        assert "test_inference_mode.py" in str(refused.value)
        assert "torch.no_grad()" in str(refused.value)
        return
    torch.manual_seed(3)
    with torch.no_grad():
        expected = module(x).cpu()
    torch.manual_seed(3)
    with torch.inference_mode():
        assert torch.equal(module(x).cpu(), expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_training_goes_on_as_after_no_grad(stage: int) -> None:
    losses = {}
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model = nn.Sequential(block(rate=0.1), nn.BatchNorm1d(4), Mean())
        engine, found = start(model, zero_optimization={"stage": stage}), []
        for step in range(4):
            # The first forward of all is one of these.
            with mode():
                found.append(engine(rows(engine, seed=9)).item())
                engine.eval()
                found.append(engine(rows(engine, seed=9)).item())
                engine.train()
            found.append(three_calls(engine, rows(engine, seed=step)).item())
        losses[mode] = found
    assert losses[torch.inference_mode] == losses[torch.no_grad]


class Mean(nn.Module):
    """The mean of squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
