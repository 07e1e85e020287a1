"""Norms of fp16 tensors: as exact, and as hard to overflow, as torch's own."""

import copy

import pytest
import torch
from torch import nn

from spmdzero.xla import DeviceMesh
from tests.unit.region_harness import ROWS, Probe, numbers

WIDTH = 64
SCALE = 1500.0 * ROWS


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm
        self.register_buffer("weights", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What a norm's backward sums is of one sign here, and so 64 times as large as its terms.
        return (self.norm(self.linear(x)).float().pow(2) * self.weights).mean(0).sum()


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH)],
    ids=lambda norm: type(norm).__name__,
)
def test_gradients_under_a_loss_scale_are_torchs(norm: nn.Module, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module = Normed(norm).half()
    x = numbers(ROWS, WIDTH).half()
    probe = Probe(copy.deepcopy(module), mesh, dtype=torch.float16)
    (module(x) * SCALE).backward()
    probe.backward(probe(probe.batch(x)) * SCALE)
    for name, parameter in module.named_parameters():
        expected = parameter.grad.float()
        assert torch.isfinite(expected).all()
        # One rounding to fp16 per replica and per operation, of the largest element's size.
        bound = 8 * torch.finfo(torch.float16).eps * expected.abs().max().item()
        got = probe.gradients[name].float()
        torch.testing.assert_close(got, expected, rtol=0, atol=bound)
