"""Max pools in programs for TPUs, and batch norm's one pass over bfloat16."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spmdzero.backend import tracing_only
from spmdzero.backend.jax.ops.norms import batch_norm_functional
from tests.jax_backend.for_tpus import step_for_tpus
from tests.support.engines import start

DEVICE = torch.device("xla", 0)


class Pooled(nn.Module):
    """[rows, 3, 16, 16] -> the mean of the largest of windows."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x)).mean()


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_tpu_adds_to_places_where_windows_have_holes_alone(dilation: int) -> None:
    text = step_for_tpus(start(Pooled(dilation)), torch.ones(8, 3, 16, 16))
    assert ("stablehlo.select_and_scatter" in text) == (dilation == 1)
    assert ('"stablehlo.scatter"' in text) == (dilation == 2)


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("ceil", [False, True])
def test_gradients_go_where_torchs_go(pad: int, ceil: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    # Of three values, so that windows have more than one largest element.
    x = torch.randint(3, (2, 3, 9, 8), generator=generator).float()
    x[0, 0, :4, :4] = -math.inf

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        made = F.max_pool2d(x, 3, 2, padding=pad, ceil_mode=ceil)
        weights = torch.arange(made.numel(), dtype=made.dtype).reshape(made.shape)
        (torch.where(made.isinf(), 0, made) * weights.to(made.device)).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient(x.to(DEVICE)), gradient(x), rtol=0, atol=0)


@pytest.mark.parametrize("platform", ["CPU", "TPU"])
@pytest.mark.parametrize("near", [0.0, 3.0], ids=["before training", "after"])
def test_bf16_is_normalised_as_finely_as_it_is_rounded(near: float, platform: str) -> None:
    x = (3 + torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))).bfloat16()
    stats = torch.full((4,), near), torch.ones(4)
    with tracing_only(platform=platform):
        ours, _, _, _, variance = batch_norm_functional(
            jnp.asarray(x.float().numpy(), jnp.bfloat16), None, None,
            jnp.array(stats[0].numpy()), jnp.array(stats[1].numpy()), True, 1.0, 1e-5,
        )  # fmt: skip
    expected = F.batch_norm(x.float(), *stats, training=True, momentum=1.0)
    # An eighth of bfloat16's last bit; float32's own rounding where the difference of squares is
    # taken of numbers of 10.
    torch.testing.assert_close(torch.tensor(np.asarray(ours)), expected, rtol=2**-11, atol=2**-11)
    torch.testing.assert_close(torch.tensor(np.asarray(variance)), stats[1], rtol=1e-4, atol=0)
