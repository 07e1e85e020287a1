"""On a GPU, where `make bench-gpu` finds one: losses are torch's, attention is cuDNN's.

Programs for GPUs are lowered without one in test_attention.py.
"""

import itertools
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import current, runtime
from spmdzero.plan import MeshSpec
from tests.unit.region_harness import Apply, Probe

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")

FORMS = [
    (heads, width, lengths, causal, dtype)
    for (heads, width, lengths), (causal, dtype) in zip(
        itertools.product(((4, 4), (4, 2)), (20, 64, 128), ((256, 256), (130, 200))),
        itertools.cycle(itertools.product((True, False), (torch.bfloat16, torch.float16))),
        strict=False,
    )
]


@pytest.mark.parametrize(("heads", "width", "lengths", "causal", "dtype"), FORMS)
def test_attention_is_cudnns_and_torchs(
    heads: tuple[int, int],
    width: int,
    lengths: tuple[int, int],
    causal: bool,
    dtype: torch.dtype,
) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = [(h, n) for h, n in zip((*heads, heads[1]), (*lengths, lengths[1]), strict=True)]
    q, k, v = (torch.randn(2, *shape, width, generator=made).to(dtype) for shape in shapes)
    grad = torch.randn(q.shape, generator=made).to(dtype)

    def forward(q: Any, k: Any, v: Any, grad: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    runtime.start()
    probe = Probe(Apply(forward), current().mesh(MeshSpec((("fsdp", 1),))))
    with torch.no_grad():
        found = [tensor.cpu() for tensor in probe(*map(probe.batch, (q, k, v, grad)))]
        right = forward(*(tensor.double() for tensor in (q, k, v, grad)))
    assert [call.plain_because for call in probe.region.attention] == [None]
    for ours, exact in zip(found, right, strict=True):
        # Weights are rounded to 8 bits (bf16) before each of two products in a row.
        bound = 2**-7 * exact.abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=bound)


class Network(nn.Module):
    """Tokens of a row and their targets -> mean loss; with attention, and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(256, 512), nn.Linear(512, 256)
        self.block = nn.TransformerEncoderLayer(512, 4, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.block(self.token(x))).flatten(0, 1), y.flatten())


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, **OFFLOADED}], ids=str)
def test_an_engine_trains_as_torch_does_on_the_cpu(zero: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Network()
    engine, *_ = spmdzero.initialize(
        model=model,
        config={
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": zero,
            "spmd": {"min_shard_elements": 1},
        },
    )
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    made = torch.Generator().manual_seed(1)
    for _ in range(5):
        x, y = torch.randint(256, (2, 4, 32), generator=made)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        exact = model(x, y)
        exact.backward()
        optimizer.step()
        optimizer.zero_grad()
        # fp32: sums of 512 terms in another order. Adam divides a gradient by its size, so that one
        # of rounding errors alone moves its element by up to a whole learning rate.
        assert loss.item() == pytest.approx(exact.item(), rel=1e-4)


def test_fp16_rounds_where_torch_does() -> None:
    """A product beyond 65,504 is infinite, also where what follows would bring it back."""
    runtime.start()
    x = torch.full((4,), 300.0, dtype=torch.float16)
    probe = Probe(Apply(lambda x: (x * x) / x), current().mesh(MeshSpec((("fsdp", 1),))))
    with torch.no_grad():
        assert probe(probe.batch(x)).cpu().isinf().all()
