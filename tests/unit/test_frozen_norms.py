"""A BatchNorm in evaluation mode inside a model that trains: fine-tuning with frozen statistics."""

import copy

import pytest
import torch
from torch import nn

from spmdzero.backend.torch_xla import DeviceMesh
from tests.unit.region_harness import ROWS, Probe, numbers

WIDTH = 16


def model(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), norm.eval(), nn.Flatten(), nn.Tanh())


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_and_statistics_are_torchs(affine: bool, mesh: DeviceMesh) -> None:
    module = model(nn.BatchNorm1d(WIDTH, affine=affine))
    x = numbers(ROWS, WIDTH, 8)
    probe = Probe(copy.deepcopy(module), mesh)
    module(x).square().sum().backward()
    probe.backward(probe(probe.batch(x)).square().sum())
    for name, parameter in module.named_parameters():
        # fp32 sums over the rows of eight devices, in another order than torch's.
        torch.testing.assert_close(probe.gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)
    for name, buffer in module.named_buffers():
        assert torch.equal(probe.module.get_buffer(name).cpu(), buffer), name


def test_bf16_rows_pass_frozen_fp32_statistics(mesh: DeviceMesh) -> None:
    module = model(nn.BatchNorm1d(WIDTH))
    x = numbers(ROWS, WIDTH, 8)
    probe = Probe(copy.deepcopy(module), mesh, dtype=torch.bfloat16)
    output = probe(probe.batch(x.bfloat16()))
    probe.backward(output.float().square().sum())
    # bf16 has 8 bits: a few roundings of values up to 1.
    torch.testing.assert_close(output.float().cpu().detach(), module(x).detach(), rtol=0, atol=0.05)
