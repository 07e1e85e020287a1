"""Buffers that a forward writes inside the replica region."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from region_harness import ROWS, Probe, assert_same_sums, numbers, torch_gradients
from torch import nn

from spmdzero.backend import Mesh, arrays, runtime
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")


class Writer(nn.Module):
    """Calls `write(self, x)` and returns the mean of x."""

    def __init__(self, write: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("state", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return x.mean()


def test_batch_norm_statistics_are_the_mean_of_the_replicas_own(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    probe = Probe(module, mesh)
    x = numbers(ROWS, 1, 8, 8)
    for _ in range(2):
        probe(probe.batch(x))
        runtime.sync()
    means, variances = torch.zeros(8, 4), torch.ones(8, 4)
    own = [nn.BatchNorm2d(4) for _ in range(8)]
    for _ in range(2):
        for replica, rows in enumerate(x.split(2)):
            own[replica](module[0](rows))
        means = torch.stack([norm.running_mean for norm in own]).mean(0)
        variances = torch.stack([norm.running_var for norm in own]).mean(0)
        for norm in own:
            norm.running_mean, norm.running_var = means.clone(), variances.clone()
    assert_same_sums(probe.buffers["1.running_mean"], means)
    assert_same_sums(probe.buffers["1.running_var"], variances)
    assert probe.buffers["1.num_batches_tracked"].item() == 2
    probe.region.check_agreement()


def test_batch_norm_normalises_by_each_replicas_own_statistics(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    probe = Probe(module, mesh)
    x, target = numbers(ROWS * 2, 6), numbers(ROWS * 2, 6, seed=1)
    output = probe(probe.batch(x))
    probe.backward(F.mse_loss(output, probe.batch(target).tensor))
    expected = torch.cat([module(rows) for rows in x.split(4)])
    assert_same_sums(output.detach(), expected.detach())
    expected_gradients = torch_gradients(module, F.mse_loss(expected, target))
    # The bias before a batch norm has no effect: its gradient is rounding noise on both sides.
    actual = probe.gradients
    assert actual.pop("0.bias").abs().max() < 1e-6
    expected_gradients.pop("0.bias")
    assert_same_sums(actual, expected_gradients)


def test_batch_norm_in_eval_uses_its_statistics_and_leaves_them(mesh: Mesh) -> None:
    probe = Probe(nn.BatchNorm1d(6), mesh)
    probe.module.eval()
    x = numbers(ROWS, 6)
    with torch.no_grad():
        output = probe(probe.batch(x))
    assert_same_sums(output, nn.BatchNorm1d(6).eval()(x))
    assert probe.buffers["running_mean"].tolist() == [0.0] * 6
    assert probe.buffers["num_batches_tracked"].item() == 0


def assign(module: nn.Module, x: torch.Tensor) -> None:
    module.state = x.sum(0)


def mutate(module: nn.Module, x: torch.Tensor) -> None:
    module.state.copy_(x.sum(0))


@pytest.mark.parametrize("write", [assign, mutate])
def test_a_float_buffer_leaves_as_its_mean_assigned_or_mutated(
    mesh: Mesh, write: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    probe = Probe(Writer(write), mesh)
    before = probe.module.state
    x = torch.arange(ROWS * 3.0).reshape(ROWS, 3)
    probe(probe.batch(x))
    runtime.sync()
    assert torch.equal(probe.buffers["state"], x.reshape(8, 2, 3).sum(1).mean(0))
    assert probe.module.state is before  # what holds the buffer sees the new value


def test_a_written_buffer_is_whole_on_every_device(mesh: Mesh) -> None:
    probe = Probe(Writer(assign), mesh)
    probe(probe.batch(numbers(ROWS, 3)))
    runtime.sync()
    shards = arrays.local_shards(probe.module.state)
    assert [tuple(shard.shape) for shard in shards] == [(3,)] * 8
    assert all(torch.equal(shard, shards[0]) for shard in shards)


def test_a_written_buffer_reaches_the_next_forward(mesh: Mesh) -> None:
    def double(module: nn.Module, x: torch.Tensor) -> None:
        module.state = module.state * 2 + 1

    probe = Probe(Writer(double), mesh)
    for _ in range(3):
        probe(probe.batch(numbers(ROWS, 3)))
        runtime.sync()
    assert probe.buffers["state"].tolist() == [7.0] * 3


def test_integer_and_bool_buffers_that_agree_keep_their_values(mesh: Mesh) -> None:
    def write(module: nn.Module, x: torch.Tensor) -> None:
        module.count += 5
        module.seen = torch.tensor([True, False], device=x.device)

    probe = Probe(Writer(write), mesh)
    probe(probe.batch(numbers(ROWS, 3)))
    runtime.sync()
    assert probe.buffers["count"].item() == 5
    assert probe.buffers["count"].dtype == torch.int64
    assert probe.buffers["seen"].tolist() == [True, False]
    probe.region.check_agreement()


def test_an_integer_buffer_that_disagrees_is_found_and_named(mesh: Mesh) -> None:
    def write(module: nn.Module, x: torch.Tensor) -> None:
        module.count += (x > 0).sum()

    probe = Probe(Writer(write), mesh)
    probe(probe.batch(torch.arange(ROWS * 3.0).reshape(ROWS, 3) - 20))
    runtime.sync()
    with pytest.raises(ReplicaRegionError, match=r"count.*differs between replicas"):
        probe.region.check_agreement()


def test_a_buffer_that_is_only_read_is_not_sent(mesh: Mesh) -> None:
    def read(module: nn.Module, x: torch.Tensor) -> None:
        module.state.sum() + module.count

    probe = Probe(Writer(read), mesh)
    before = {name: buffer._version for name, buffer in probe.module.named_buffers()}
    probe(probe.batch(numbers(ROWS, 3)))
    after = {name: buffer._version for name, buffer in probe.module.named_buffers()}
    assert after == before
    assert probe.region.disagreements == {}
