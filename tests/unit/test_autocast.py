"""`torch_autocast` casts what CUDA's lists name, on both backends.

The names are those of torch's documentation, "CUDA Op-Specific Behavior" (docs/source/amp.md).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spmdzero.backend import _autocast_lists as lists
from spmdzero.backend import runtime
from spmdzero.errors import SpmdZeroUsageError
from tests.support import engines

pytestmark = pytest.mark.backends("jax", "torch_xla")

HALF, FULL = torch.bfloat16, torch.float32
Op = Callable[[torch.Tensor], torch.Tensor]


def cell(kind: type[nn.Module]) -> Op:
    def run(x: torch.Tensor) -> torch.Tensor:
        made = kind(4, 4).to(x.device)(x)
        return made[0] if isinstance(made, tuple) else made

    return run


def conv(function: Callable[..., torch.Tensor], dims: int) -> Op:
    return lambda x: function(
        x.reshape(1, 4, *(4,), *(1,) * (dims - 1)), ones(x, 4, 4, *(1,) * dims)
    )


def ones(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64, device=x.device)


# x is [4, 4], positive.
LOWER: dict[str, Op] = {
    "__matmul__": lambda x: x @ x,
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "addmv": lambda x: torch.addmv(x[0], x, x[0]),
    "addr": lambda x: torch.addr(x, x[0], x[0]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "chain_matmul": lambda x: torch.chain_matmul(x, x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "conv1d": conv(F.conv1d, 1),
    "conv2d": conv(F.conv2d, 2),
    "conv3d": conv(F.conv3d, 3),
    "conv_transpose1d": conv(F.conv_transpose1d, 1),
    "conv_transpose2d": conv(F.conv_transpose2d, 2),
    "conv_transpose3d": conv(F.conv_transpose3d, 3),
    "GRUCell": cell(nn.GRUCell),
    "linear": lambda x: F.linear(x, x),
    "LSTMCell": cell(nn.LSTMCell),
    "matmul": lambda x: torch.matmul(x, x),
    "mm": lambda x: torch.mm(x, x),
    "mv": lambda x: torch.mv(x, x[0]),
    "prelu": lambda x: F.prelu(x, x[0]),
    "RNNCell": cell(nn.RNNCell),
}
FLOAT: dict[str, Op] = {
    "__pow__": lambda x: x**2,
    "__rdiv__": lambda x: x.__rdiv__(2.0),
    "__rpow__": lambda x: 2.0**x,
    "__rtruediv__": lambda x: 2.0 / x,
    "acos": torch.acos,
    "asin": torch.asin,
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cosh": torch.cosh,
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, ones(x, 4)),
    "cdist": lambda x: torch.cdist(x, x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, classes(x)),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "dist": lambda x: torch.dist(x, x),
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "group_norm": lambda x: F.group_norm(x, 2),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, ones(x, 4, 4)),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "l1_loss": lambda x: F.l1_loss(x, x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "log": torch.log,
    "log10": torch.log10,
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log1p": torch.log1p,
    "log2": torch.log2,
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x[0], x[1], x[2]),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x[0], classes(x)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, classes(x)),
    "nll_loss": lambda x: F.nll_loss(x, classes(x)),
    "norm": lambda x: torch.norm(x),
    "normalize": lambda x: F.normalize(x),
    "pdist": lambda x: F.pdist(x),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x),
    "pow": lambda x: torch.pow(x, 2),
    "prod": torch.prod,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sinh": torch.sinh,
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "softmax": lambda x: F.softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "softplus": F.softplus,
    "sum": torch.sum,
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "tan": torch.tan,
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x, x),
}
# y has another dtype than x.
Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WIDEST: dict[str, Two] = {
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "atan2": torch.atan2,
    "bilinear": lambda x, y: F.bilinear(x, y, ones(x, 2, 4, 4)),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "grid_sample": lambda x, y: F.grid_sample(
        x[None, None], y[None, :, :2, None].expand(1, 4, 2, 2), align_corners=False
    ),
    "index_put": lambda x, y: torch.index_put(x, (classes(x),), y[0]),
    "scatter_add": lambda x, y: torch.scatter_add(x, 0, classes(x)[None], y),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=1),
}
# What is on no list is computed as it comes.
AS_GIVEN: dict[str, Op] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "add": lambda x: x + x,
    "mean": torch.mean,
    "tanh": torch.tanh,
    "max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "softmax with a dtype": lambda x: F.softmax(x, -1, dtype=HALF) + x * 0,
    "cat": lambda x: torch.cat([x, x]),
}


def tensor(dtype: torch.dtype) -> torch.Tensor:
    runtime.start()
    return (torch.rand(4, 4) * 0.5 + 0.25).to(dtype).to(runtime.device())


def results(op: Callable[..., torch.Tensor], *dtypes: torch.dtype) -> torch.dtype:
    given = [tensor(dtype) for dtype in dtypes]
    with torch.autocast("xla", dtype=HALF):
        return op(*given).dtype


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("name", LOWER)
def test_a_product_of_full_precision_is_computed_in_half(name: str) -> None:
    assert results(LOWER[name], FULL) == HALF


@pytest.mark.parametrize("name", FLOAT)
def test_what_half_precision_would_harm_is_computed_in_full(name: str) -> None:
    assert results(FLOAT[name], HALF) == FULL


@pytest.mark.parametrize("name", WIDEST)
def test_operands_of_two_dtypes_are_computed_in_the_wider(name: str) -> None:
    assert results(WIDEST[name], HALF, FULL) == FULL
    assert results(WIDEST[name], FULL, HALF) == FULL
    assert results(WIDEST[name], HALF, HALF) == HALF


@pytest.mark.parametrize("name", AS_GIVEN)
def test_the_rest_is_computed_as_it_comes(name: str) -> None:
    assert results(AS_GIVEN[name], HALF) == HALF
    if name != "softmax with a dtype":
        assert results(AS_GIVEN[name], FULL) == FULL


def test_a_loss_of_probabilities_is_refused_as_on_cuda() -> None:
    x = tensor(HALF)
    with torch.autocast("xla", dtype=HALF), pytest.raises(SpmdZeroUsageError, match="with_logits"):
        F.binary_cross_entropy(x, x)


def test_the_cpus_own_lists_stay_the_cpus() -> None:
    x = torch.rand(4, 4)
    with torch.autocast("cpu", dtype=HALF), torch.autocast("xla", dtype=HALF):
        assert (x @ x).dtype == HALF
        assert F.layer_norm((x @ x), (4,)).dtype == HALF


@pytest.mark.skipif(not torch.__version__.startswith("2.9."), reason="the lists of this release")
def test_the_lists_are_those_that_torch_registers_for_cuda() -> None:
    theirs = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    cudnns = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    cudnns |= {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"}
    mine = {*lists.LOWER, *lists.FLOAT, *lists.WIDEST, lists.REFUSED}
    assert mine == {name.removeprefix("aten::") for name in theirs} - cudnns


class Listed(nn.Module):
    """Notes the dtypes that its operations have in the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        line = self.line(x)
        norm = self.norm(line)
        self.seen.update(line=line.dtype, norm=norm.dtype, softmax=line.softmax(-1).dtype)
        return norm.pow(2).mean() + line.softmax(-1).sum()


@pytest.mark.parametrize("style", [engines.one_call, engines.three_calls])
def test_an_engine_casts_by_them(style: Any) -> None:
    section = {"enabled": True, "dtype": "bfloat16"}
    engine = engines.start(Listed(), torch_autocast=section, spmd={"capture": False})
    style(engine, torch.rand(8, 4))
    assert engine.module.seen == {"line": HALF, "norm": FULL, "softmax": FULL}
