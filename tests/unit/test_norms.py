"""Norms as torch computes them: of fp16 tensors, and with frozen statistics in training."""

import copy

import pytest
import torch
from torch import nn

from spmdzero.backend import Mesh
from tests.unit.region_harness import ROWS, Probe, numbers

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

WIDTH, CHANNELS = 64, 16
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
def test_gradients_under_a_loss_scale_are_torchs(norm: nn.Module, mesh: Mesh) -> None:
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


@pytest.mark.parametrize("statistics", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_of_bf16_rows_has_the_mean_statistics_of_torchs_fp32(
    statistics: torch.dtype, mesh: Mesh
) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    x = numbers(ROWS, WIDTH).bfloat16()
    given = copy.deepcopy(norm)
    given.running_mean, given.running_var = norm.running_mean.to(statistics), norm.running_var
    probe = Probe(given, mesh, dtype=torch.bfloat16)
    output = probe(probe.batch(x))
    own = [copy.deepcopy(norm) for _ in range(mesh.size)]
    parts = [replica(rows) for replica, rows in zip(own, x.float().split(2), strict=True)]
    # Rounded to bf16 once, from sums of two rows in fp32.
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(output.detach().cpu().float(), torch.cat(parts), rtol=eps, atol=eps)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(replica, name) for replica in own]).mean(0)
        found = probe.buffers[name].float()
        bound = eps if getattr(given, name).dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def frozen(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 3), norm.eval(), nn.Flatten(), nn.Tanh())


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_and_statistics_are_torchs(affine: bool, mesh: Mesh) -> None:
    module = frozen(nn.BatchNorm1d(CHANNELS, affine=affine))
    x = numbers(ROWS, CHANNELS, 8)
    probe = Probe(copy.deepcopy(module), mesh)
    module(x).square().sum().backward()
    probe.backward(probe(probe.batch(x)).square().sum())
    for name, parameter in module.named_parameters():
        # fp32 sums over the rows of eight devices, in another order than torch's.
        torch.testing.assert_close(probe.gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)
    for name, buffer in module.named_buffers():
        assert torch.equal(probe.module.get_buffer(name).cpu(), buffer), name


def test_bf16_rows_pass_frozen_fp32_statistics(mesh: Mesh) -> None:
    module = frozen(nn.BatchNorm1d(CHANNELS))
    x = numbers(ROWS, CHANNELS, 8)
    probe = Probe(copy.deepcopy(module), mesh, dtype=torch.bfloat16)
    output = probe(probe.batch(x.bfloat16()))
    probe.backward(output.float().square().sum())
    # bf16 has 8 bits: a few roundings of values up to 1.
    torch.testing.assert_close(output.float().cpu().detach(), module(x).detach(), rtol=0, atol=0.05)
