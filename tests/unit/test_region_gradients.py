"""What the replica region computes is what torch computes on one device with the whole batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_harness import (
    ROWS,
    Probe,
    assert_same_sums,
    numbers,
    torch_gradients,
)
from torch import nn

from spmdzero.backend import Mesh, counters

pytestmark = pytest.mark.backends("jax", "torch_xla")


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=batch_first
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.norm(self.layer(x)))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.norm(x).tanh())
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(4)
    return Classifier()


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(3)
    return Encoder()


TOKENS = numbers(ROWS, 6, 32)
LABELS = torch.randint(0, 10, (ROWS, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_the_loss_and_its_gradients_equal_torch(mesh: Mesh, encoder: Encoder, inside: bool) -> None:
    def loss_of(model: Any, x: Any, labels: Any, targets: torch.Tensor) -> torch.Tensor:
        if inside:
            return model(x, labels=labels)
        return F.cross_entropy(model(x).flatten(0, 1), targets.flatten())

    probe = Probe(encoder, mesh)
    labels = probe.batch(LABELS)
    loss = loss_of(probe, probe.batch(TOKENS), labels, labels.tensor)
    probe.backward(loss)
    expected = loss_of(encoder, TOKENS, LABELS, LABELS)
    assert_same_sums(loss.detach(), expected.detach())
    assert_same_sums(probe.gradients, torch_gradients(encoder, expected))


def test_a_loss_outside_over_unevenly_masked_rows_is_the_global_mean(
    mesh: Mesh, classifier: Classifier
) -> None:
    masked = LABELS.clone()
    masked[:5, 2:] = -100
    probe = Probe(classifier, mesh)
    logits = probe(probe.batch(TOKENS))
    loss = F.cross_entropy(logits.flatten(0, 1), probe.batch(masked).tensor.flatten())
    assert_same_sums(loss.detach(), classifier(TOKENS, masked).detach())


def test_a_loss_inside_over_unevenly_masked_rows_is_the_mean_of_the_replicas_means(
    mesh: Mesh, classifier: Classifier
) -> None:
    masked = LABELS.clone()
    masked[:5, 2:] = -100
    probe = Probe(classifier, mesh)
    loss = probe(probe.batch(TOKENS), probe.batch(masked))
    probe.backward(loss)
    rows = zip(TOKENS.split(2), masked.split(2), strict=True)
    expected = torch.stack([classifier(x, y) for x, y in rows]).mean()
    assert_same_sums(loss.detach(), expected.detach())
    assert (expected - classifier(TOKENS, masked)).abs() > 1e-3  # or the claim says nothing
    assert_same_sums(probe.gradients, torch_gradients(classifier, expected))


def test_batch_dim_1_models_equal_torch(mesh: Mesh) -> None:
    torch.manual_seed(3)
    encoder = Encoder(batch_first=False)
    probe = Probe(encoder, mesh, batch_dim=1)
    tokens = TOKENS.transpose(0, 1).contiguous()
    logits = probe(probe.batch(tokens, dim=1))
    probe.backward(logits.square().mean())
    expected = encoder(tokens)
    assert_same_sums(logits.detach(), expected.detach())
    assert_same_sums(probe.gradients, torch_gradients(encoder, expected.square().mean()))


def test_the_gradient_of_a_batch_input_is_its_rows_own(mesh: Mesh, classifier: Classifier) -> None:
    probe = Probe(classifier, mesh)
    batch = probe.batch(TOKENS)
    batch.tensor.requires_grad_()
    probe.backward(probe(batch).square().mean())
    expected = TOKENS.clone().requires_grad_()
    classifier(expected).square().mean().backward()
    assert_same_sums(batch.tensor.grad, expected.grad)


def test_the_gradient_of_a_whole_input_is_the_sum_over_replicas(mesh: Mesh) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return (x * table).square().mean()

    probe = Probe(Scaled(), mesh)
    x, table = numbers(ROWS, 5), numbers(2, 5, seed=1)
    whole = mesh.place(table).requires_grad_()
    probe.backward(probe(probe.batch(x), whole))
    expected = table.clone().requires_grad_()
    (x.reshape(8, 2, 5) * expected).square().mean().backward()
    assert_same_sums(whole.grad, expected.grad)


def test_tied_weights_have_one_gradient_the_sum_of_both_uses(mesh: Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.embedding(ids).tanh()), (ids + 1) % 20)

    torch.manual_seed(0)
    module = Tied()
    probe = Probe(module, mesh)
    assert probe.module.head.weight is probe.module.embedding.weight
    ids = torch.randint(0, 20, (ROWS,))
    probe.backward(probe(probe.batch(ids)))
    assert probe.sink_calls == ["embedding.weight"]
    assert_same_sums(probe.gradients, torch_gradients(module, module(ids)))


def test_frozen_and_unused_parameters_have_no_gradient(mesh: Mesh) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = (nn.Linear(8, 8) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.frozen(x)).square().mean()

    torch.manual_seed(0)
    module, x = Partly(), numbers(ROWS, 8)
    probe = Probe(module, mesh)
    probe.backward(probe(probe.batch(x)))
    assert probe.gradients.keys() == {"used.weight", "used.bias"}
    assert_same_sums(probe.gradients, torch_gradients(module, module(x)))


def test_no_grad_gives_the_same_output_without_a_graph(mesh: Mesh, classifier: Classifier) -> None:
    probe = Probe(classifier, mesh)
    with torch.no_grad():
        logits = probe(probe.batch(TOKENS))
    assert not logits.requires_grad
    with torch.no_grad():
        assert_same_sums(logits, classifier(TOKENS))


def test_eval_switches_dropout_off(mesh: Mesh) -> None:
    probe = Probe(nn.Sequential(nn.Dropout(0.5)), mesh)
    x = numbers(ROWS, 64)
    probe.module.eval()
    torch.testing.assert_close(probe(probe.batch(x)).cpu(), x, rtol=0, atol=0)
    probe.module.train()
    dropped = (probe(probe.batch(x)).cpu() == 0).float().mean().item()
    assert abs(dropped - 0.5) < 5 * 0.5 / (ROWS * 64) ** 0.5  # 5 sigma of 1,024 coin tosses


def test_two_micro_batches_sum_to_the_gradient_of_both(mesh: Mesh, classifier: Classifier) -> None:
    probe = Probe(classifier, mesh)
    more = numbers(ROWS, 6, 32, seed=9)
    for tokens in (TOKENS, more):
        probe.backward(probe(probe.batch(tokens), probe.batch(LABELS)) / 2)
    both = classifier(torch.cat([TOKENS, more]), torch.cat([LABELS, LABELS]))
    assert_same_sums(probe.gradients, torch_gradients(classifier, both))


def test_the_second_identical_step_compiles_nothing(mesh: Mesh, classifier: Classifier) -> None:
    def step(probe: Probe) -> None:
        probe.backward(probe(probe.batch(TOKENS), probe.batch(LABELS)))
        probe.gradients.clear()
        probe.region.check_agreement()

    step(Probe(classifier, mesh))
    before = counters.compiled()[0]
    step(Probe(classifier, mesh))
    assert counters.compiled()[0] == before
