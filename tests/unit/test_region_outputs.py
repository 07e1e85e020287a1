"""How inputs enter the replica region and how outputs leave it: by rule, or not at all."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from region_harness import ROWS, Apply, Probe, X, exactly, numbers, run
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import SequenceClassifierOutput

from spmdzero.backend import Mesh, RegionRules, map_tensors, replicated
from spmdzero.data._inputs import InputPlacer
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")

PER_REPLICA = X.reshape(8, 2, 4)  # replica r holds rows 2r and 2r + 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    label: str


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = [tensor]


def apply(function: Any, mesh: Mesh, *args: Any, **rules: Any) -> Any:
    """The function's output in global space, tensors moved to the CPU."""
    probe = Probe(Apply(function), mesh, **rules)
    placed = [probe.batch(a) if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        return map_tensors(probe(*placed), lambda _, t: t.cpu())


# -- inputs --------------------------------------------------------------------------------


def test_each_replica_sees_its_own_rows_and_no_others(mesh: Mesh) -> None:
    def rows_beside_their_maximum(x: torch.Tensor) -> torch.Tensor:
        assert tuple(x.shape) == (2, 4)
        return torch.stack([x[:, 0], x.max().expand(2)], dim=1)

    output = run(rows_beside_their_maximum, mesh, X)
    exactly(output[:, 0], X[:, 0])
    exactly(output[:, 1], PER_REPLICA.amax((1, 2)).repeat_interleave(2))


def test_a_plain_tensor_enters_whole(mesh: Mesh) -> None:
    seen: list[tuple[int, ...]] = []

    def add(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(table.shape))
        return x + table.sum()

    probe = Probe(Apply(add), mesh)
    table = numbers(ROWS, 4, seed=1).round()
    with torch.no_grad():
        output = probe(probe.batch(X), mesh.place(table)).cpu()
    assert seen == [(ROWS, 4)]
    exactly(output, X + table.sum())


def test_a_table_with_a_batchs_rows_enters_whole_when_declared_replicated(
    mesh: Mesh,
) -> None:
    module = Apply(lambda x, table: x + table.sum())
    probe = Probe(module, mesh)
    placer = InputPlacer(mesh=mesh, module=module, rules=RegionRules(), micro_batch=2)
    table = numbers(ROWS, 4, seed=1).round()
    with torch.no_grad():
        args, kwargs = placer((X, replicated(table)), {}, training=True)
        exactly(probe.region(args, kwargs).cpu(), X + table.sum())
        args, kwargs = placer((X, table), {}, training=True)
        own_rows = table.reshape(8, -1).sum(1).repeat_interleave(2)[:, None]
        exactly(probe.region(args, kwargs).cpu(), X + own_rows)


def test_integer_inputs_enter_as_shards_without_gradients(mesh: Mesh) -> None:
    probe = Probe(nn.Embedding(50, 4), mesh)
    ids = torch.randint(0, 50, (ROWS, 3), generator=torch.Generator().manual_seed(0))
    output = probe(probe.batch(ids))
    exactly(output.detach().cpu(), probe.module.weight.detach().cpu()[ids])


def test_inputs_inside_dicts_lists_dataclasses_and_objects_enter(mesh: Mesh) -> None:
    def total(tree: dict[str, Any], holder: Holder) -> torch.Tensor:
        pair, record = tree["items"][0], tree["record"]
        assert (tree["name"], record.label) == ("kept", "kept")
        return pair.left + 10 * pair.right[0] + 100 * record.value + 1000 * holder.inner[0]

    probe = Probe(Apply(total), mesh)

    def batch(n: int) -> Any:
        return probe.batch(X + n)

    tree = {"items": [Pair(batch(0), (batch(1),))], "record": Record(batch(2), "kept")}
    with torch.no_grad():
        output = probe({**tree, "name": "kept"}, Holder(batch(3)))
    exactly(output.cpu(), X + 10 * (X + 1) + 100 * (X + 2) + 1000 * (X + 3))


# -- outputs by rule -----------------------------------------------------------------------


def test_outputs_inside_any_container_leave(mesh: Mesh) -> None:
    def everything(x: torch.Tensor) -> dict[str, Any]:
        return {
            "list": [x, "kept"],
            "pair": Pair(x + 1, None),
            "record": Record(x + 2, "kept"),
            "model output": SequenceClassifierOutput(loss=x.mean(), logits=x + 3),
            "object": Holder(x + 4),
        }

    output = apply(everything, mesh, X)
    exactly(output["list"][0], X)
    exactly(output["pair"].left, X + 1)
    exactly(output["record"].value, X + 2)
    exactly(output["model output"].loss, X.mean())
    exactly(output["model output"].logits, X + 3)
    exactly(output["object"].inner[0], X + 4)
    assert (output["list"][1], output["pair"].right, output["record"].label) == (
        ("kept", None, "kept")
    )


def test_a_key_value_cache_leaves_as_batches(mesh: Mesh) -> None:
    def cached(x: torch.Tensor) -> DynamicCache:
        cache = DynamicCache()
        cache.update(x[:, None, None], x[:, None, None] * 2, 0)
        return cache

    layer = apply(cached, mesh, X).layers[0]
    exactly(layer.keys, X[:, None, None])
    exactly(layer.values, X[:, None, None] * 2)


def test_several_scalars_leave_each_as_its_mean_over_replicas(mesh: Mesh) -> None:
    losses = apply(lambda x: {"low": x.min(), "high": [x.max()]}, mesh, X)
    exactly(losses["low"], PER_REPLICA.amin((1, 2)).mean())
    exactly(losses["high"][0], PER_REPLICA.amax((1, 2)).mean())


def test_a_sum_of_scalar_outputs_differentiates_through_each(mesh: Mesh) -> None:
    probe = Probe(nn.Linear(4, 1), mesh)
    module = nn.Linear(4, 1)
    module.load_state_dict({k: v.cpu() for k, v in probe.module.state_dict().items()})
    probe.module.forward = lambda x: _two_losses(probe.module, x)
    x = numbers(ROWS, 4)
    first, second = probe(probe.batch(x))
    probe.backward(first + 3 * second)
    a, b = _two_losses(module, x)
    (a + 3 * b).backward()
    assert module.weight.grad is not None
    # 16 rows of products of order 1, summed in another order: 16 * 6e-8.
    torch.testing.assert_close(probe.gradients["weight"], module.weight.grad, rtol=1e-5, atol=1e-5)


def _two_losses(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = nn.functional.linear(x, module.weight, module.bias)
    return y.square().mean(), y.abs().mean()


def test_an_integer_scalar_that_agrees_leaves_as_its_value(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: torch.tensor(x.shape[0], device=x.device)), mesh)
    with torch.no_grad():
        assert probe(probe.batch(X)).item() == 2
    probe.region.check_agreement()


def test_an_integer_scalar_that_disagrees_is_found_by_check_agreement(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: {"count": (x > 20).sum()}), mesh)
    with torch.no_grad():
        probe(probe.batch(X))
    with pytest.raises(ReplicaRegionError, match=r"output 'count'.*differs between replicas"):
        probe.region.check_agreement()
    probe.region.check_agreement()  # reported once


def test_a_disagreement_is_remembered_over_calls_that_agree(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: {"count": (x > 20).sum()}), mesh)
    with torch.no_grad():
        probe(probe.batch(X))
        probe(probe.batch(X * 0))
    with pytest.raises(ReplicaRegionError, match="count"):
        probe.region.check_agreement()


# -- outputs by declaration ----------------------------------------------------------------


def test_an_output_of_unknown_layout_is_an_error_that_says_how_to_declare_it(
    mesh: Mesh,
) -> None:
    with pytest.raises(ReplicaRegionError) as caught:
        apply(lambda x: {"aux": [x.sum(0)[:3]]}, mesh, X)
    message = str(caught.value)
    assert "'aux.0' has shape [3]" in message
    assert "2 rows" in message
    assert '"spmd": {"outputs": {"aux.0": "mean"}}' in message
    assert all(f'"{rule}"' in message for rule in ("batch", "sum", "agree", "stack"))
    assert '"batch_dim": 1' in message


PER_REPLICA_SUMS = PER_REPLICA.sum(1)  # [8, 4], row r is what replica r returns
DECLARED = {
    "mean": PER_REPLICA_SUMS.mean(0),
    "sum": PER_REPLICA_SUMS.sum(0),
    "stack": PER_REPLICA_SUMS,
    "batch": PER_REPLICA_SUMS.reshape(-1),
}


@pytest.mark.parametrize("rule", DECLARED)
def test_a_declared_rule_is_followed(mesh: Mesh, rule: str) -> None:
    output = apply(lambda x: {"v": x.sum(0)}, mesh, X, outputs={"v": rule})
    exactly(output["v"], DECLARED[rule])


def test_a_rule_may_overrule_what_a_scalar_would_do(mesh: Mesh) -> None:
    output = apply(
        lambda x: {"a": x.sum(), "b": x.sum()}, mesh, X, outputs={"a": "sum", "b": "stack"}
    )
    exactly(output["a"], X.sum())
    exactly(output["b"], PER_REPLICA.sum((1, 2)))


def test_agree_gives_the_common_value_and_reports_a_difference(mesh: Mesh) -> None:
    same = Probe(Apply(lambda x: {"v": x[0] * 0 + 3}), mesh, outputs={"v": "agree"})
    other = Probe(Apply(lambda x: {"v": x[0]}), mesh, outputs={"v": "agree"})
    with torch.no_grad():
        exactly(same(same.batch(X))["v"].cpu(), torch.full((4,), 3.0))
        same.region.check_agreement()
        other(other.batch(X))
        with pytest.raises(ReplicaRegionError, match="'v'"):
            other.region.check_agreement()


@pytest.mark.parametrize(("rule", "factor"), [("mean", 1 / 8), ("sum", 1.0), ("stack", 1.0)])
def test_a_declared_output_carries_its_gradient(mesh: Mesh, rule: str, factor: float) -> None:
    probe = Probe(nn.Linear(4, 3, bias=False), mesh, outputs={"": rule})
    probe.module.register_forward_hook(lambda m, i, output: output.sum(0))
    x = X / 64  # exact in binary
    probe.backward(probe(probe.batch(x)).sum())
    exactly(probe.gradients["weight"], (x.sum(0) * factor).expand(3, 4))


def test_batch_dim_1_splits_and_joins_the_second_dim(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: x - x.min()), mesh, batch_dim=1)
    x = X.T.contiguous()
    with torch.no_grad():
        output = probe(probe.batch(x, dim=1)).cpu()
    exactly(output, x - PER_REPLICA.amin((1, 2)).repeat_interleave(2))
