"""Scripts that are written to DeepSpeed-Ulysses: its registration, its adapter and its loss."""

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import runtime
from spmdzero.compat import parallel_state_sp
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from tests.jax_backend.test_tensor_axis import (
    CLOSE,
    LENGTH,
    ROWS,
    WIDTH,
    assert_same,
    batch,
    config_of,
    llama,
    started,
    trained,
)

STEPS, SHARED = 3, 2
# DeepSpeed's tutorial gathers by it, which torch 2.14 has another name for.
ITS_GATHER = pytest.mark.filterwarnings(
    "ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"
)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    parallel_state_sp._release_sequence_parallel_groups()


def registered(size: int = SHARED, **more: Any) -> Any:
    from spmdzero.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    asked = {"core_attn_implementation": "sdpa", "micro_batch_size": 2, "seq_length": LENGTH} | more
    model = asked.pop("model_name_or_path", "nobody/asks-a-hub")
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, sequence_parallel_size=size, **asked
    )


def rows_of_own_lengths() -> list[dict[str, torch.Tensor]]:
    """Batches of which each row has as many labels, and half of them none."""
    found = []
    for step in range(STEPS):
        whole = batch(step) | {"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
        whole["labels"] = whole["labels"].clone()
        whole["labels"][:, : LENGTH // 2] = -100
        found.append(whole)
    return found


def weighted(loss: torch.Tensor, shift_labels: torch.Tensor, group: Any, count: int) -> Any:
    """The loss of DeepSpeed's tutorial: the mean of the ranks' losses, by their labels."""
    gather: Any = torch.distributed.nn.functional.all_gather
    losses = gather(loss, group=group)
    tokens_of = gather((shift_labels != -100).view(-1).sum(), group=group)
    total = sum(losses[i] * tokens_of[i] for i in range(count) if tokens_of[i] > 0)
    return total / max(sum(tokens_of), 1)


@ITS_GATHER
def test_the_tutorials_script_trains_as_on_one_axis() -> None:
    from spmdzero.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from spmdzero.runtime.utils import move_to_device
    from spmdzero.utils import groups

    batches = rows_of_own_lengths()
    alone = started({"fsdp": 8})
    expected = [alone.train_batch(iter([each])).item() for each in batches]

    mpu = registered()
    config = config_of({"fsdp": 4})
    config["spmd"]["mesh"] = {"fsdp": -1}
    engine, *_ = spmdzero.initialize(model=llama(), config=config, mpu=mpu)
    assert dict(engine.mesh.spec.axes) == {"fsdp": 4, "sequence": SHARED}
    group = groups._get_sequence_parallel_group()
    assert engine.get_sequence_parallel_group() is group
    count, rank = groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()
    assert (count, rank, dist.get_world_size(group), dist.get_rank(group)) == (SHARED, 0, SHARED, 0)
    loader = UlyssesSPDataLoaderAdapter(
        batches, sp_rank=rank, sp_group=group, sp_world_size=count, device=engine.device
    )
    assert len(loader) == STEPS
    found = []
    for each in loader:
        assert "labels" not in each
        each = move_to_device(each, engine.device)
        loss = engine.module.loss_function(
            logits=engine(**each).logits,
            labels=None,
            shift_labels=each["shift_labels"],
            vocab_size=engine.module.config.vocab_size,
        )
        loss = weighted(loss, each["shift_labels"], group, count)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    norms = [float(e.get_global_grad_norm()) for e in (engine, alone)]
    assert_same([*found, norms[0]], [*expected, norms[1]])
    assert len([*loader]) == STEPS


@ITS_GATHER
def test_what_the_group_says_of_numbers_and_of_parts_of_rows() -> None:
    group = registered().get_sequence_parallel_group()
    number = torch.tensor(3.0, device=runtime.device(), requires_grad=True)
    one, other = torch.distributed.nn.functional.all_gather(number * 2, group=group)
    (one + 5 * other).backward()
    assert (one.item(), other.item(), number.grad.item()) == (6.0, 6.0, 12.0)
    kept = torch.tensor([1.0, 2.0])
    dist.all_reduce(kept, op=dist.ReduceOp.MAX, group=group)
    spmdzero.comm.all_reduce(kept, op=spmdzero.comm.ReduceOp.AVG, group=group)
    assert kept.tolist() == [1.0, 2.0]
    with pytest.raises(SpmdZeroUsageError, match=r"all_reduce with SUM.*count as often"):
        dist.all_reduce(kept, group=group)
    with pytest.raises(SpmdZeroUsageError, match=r"all_gather of a tensor \[2\].*2 times"):
        dist.all_gather([torch.empty(2)] * SHARED, kept, group=group)
    with pytest.raises(SpmdZeroUsageError, match="scatter over the devices that share rows"):
        dist.scatter(kept, [kept, kept], group=group)
    assert copy.deepcopy(group) is group


def test_what_the_registration_and_initialize_refuse() -> None:
    assert registered(1) is None
    with pytest.raises(ValueError, match="the call asks for 'flash_attention_2'"):
        registered(core_attn_implementation="flash_attention_2")
    model = llama()
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="the model asks for 'eager'"):
        registered(model_name_or_path=model)
    with pytest.raises(ValueError, match="seq_length doesn't say it"):
        registered(seq_length=None, seq_length_is_variable=False)
    with pytest.raises(AssertionError, match="register_with_transformers"):
        parallel_state_sp.get_sequence_parallel_group()
    mpu = registered()
    with pytest.raises(SpmdZeroUsageError, match="2 devices share rows in this process already"):
        registered(4)
    config = config_of({"fsdp": 2}, sequence_parallel_size=4)
    with pytest.raises(SpmdZeroConfigError, match="the mpu says 2"):
        spmdzero.initialize(model=llama(), config=config, mpu=mpu)
    with pytest.raises(SpmdZeroUsageError, match="groups of processes"):
        spmdzero.initialize(model=llama(), config=config, mpu=object())


def test_mesh_param_makes_the_axes_and_the_group() -> None:
    from spmdzero.utils import groups

    config = config_of({"fsdp": 4})
    config["spmd"]["mesh"] = {"fsdp": -1}
    engine, *_ = spmdzero.initialize(model=llama(), config=config, mesh_param=(4, 2))
    assert dict(engine.mesh.spec.axes) == {"fsdp": 4, "sequence": 2}
    assert (engine.dp_world_size, engine.sequence_parallel_size) == (4, 2)
    # DeepSpeed's scripts ask for the group once the engine is there.
    assert engine.get_sequence_parallel_group() is groups._get_sequence_parallel_group()
    assert groups._get_sequence_parallel_world_size() == 2
    alone, *_ = spmdzero.initialize(
        model=llama(), config=config | {"train_micro_batch_size_per_gpu": 1}, mesh_param=(8, 1)
    )
    assert dict(alone.mesh.spec.axes) == {"fsdp": 8}
    keys = {"data_parallel_size": 4, "sequence_parallel_size": 2}
    by_keys, *_ = spmdzero.initialize(model=llama(), config=config | keys)
    assert by_keys.mesh.spec == engine.mesh.spec


@pytest.mark.parametrize(
    ("asked", "more", "said"),
    [
        ((2, 2), {}, r"multiply to 4, there are 8 devices"),
        ((8,), {}, r"mesh_param=\(8,\)\): it is \(data_parallel, sequence_parallel\)"),
        ((4, 0), {}, r"\(data_parallel, sequence_parallel\).* such as \(2, 4\)"),
        ((4, 2), {"sequence_parallel_size": 4}, r"= 4: mesh_param=\(4, 2\) says 2"),
        ((4, 2), {"data_parallel_size": 2}, r"= 2: mesh_param=\(4, 2\) says 4"),
        ((4, 2), {"spmd": {"mesh": {"fsdp": 8}}}, r"data_parallel_size = 4: .*'fsdp': 8"),
        ((4, 2), {"spmd": {"mesh": {"data": 3, "fsdp": -1}}}, r"size = 4: .*'data': 3"),
    ],
)
def test_a_mesh_param_that_does_not_fit_is_refused_with_the_numbers(
    asked: Any, more: dict[str, Any], said: str
) -> None:
    config = config_of({"fsdp": 4})
    config["spmd"]["mesh"] = {"fsdp": -1}
    with pytest.raises((SpmdZeroConfigError, SpmdZeroUsageError), match=said):
        spmdzero.initialize(model=llama(), config=config | more, mesh_param=asked)


def test_the_command_line_may_name_the_config(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    config = config_of({"fsdp": 4})
    config["spmd"]["mesh"] = {"fsdp": -1}
    file.write_text(json.dumps(config))
    args = argparse.Namespace(deepspeed_config=str(file))
    engine, *_ = spmdzero.initialize(args=args, model=llama(), mpu=registered())
    assert engine.sequence_parallel_size == SHARED
    adapted = spmdzero.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
    engine, *_ = spmdzero.initialize(args=args, model=adapted)
    assert dict(engine.mesh.spec.axes) == {"fsdp": 4, "tensor": 2}


class Megatrons(nn.Module):
    """A block with DeepSpeed's attention around one of the user's, positions in dim 1."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        from spmdzero.sequence.layer import DistributedAttention

        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = DistributedAttention(self.attend, group, scatter_idx=2, gather_idx=1)

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        heads = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).unbind(2)
        found = self.attention(q, k, v, 0, None, True)
        return (self.out(found.flatten(2)) - x).square().mean()


def test_distributed_attention_is_that_of_whole_rows_by_all_to_alls() -> None:
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    mpu = registered()
    for mesh, given in (({"fsdp": 8}, None), ({"fsdp": 4, "sequence": SHARED}, mpu)):
        model = Megatrons(given and given.get_sequence_parallel_group())
        engine, *_ = spmdzero.initialize(model=model, config=config_of(mesh), mpu=given)
        found.append([engine.train_batch(iter([(x,)])).item() for _ in range(STEPS)])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train_batch(iter([(x,)]))
    moved = [c for c in ledgers.boundary.of_role("sequence") if c.kind == "all-to-all"]
    # Query, key and value together, and the result; forward and backward.
    assert len(moved) == 4
    assert ledgers.boundary.activations == ()


def test_what_distributed_attention_cannot_do_is_refused() -> None:
    from spmdzero.sequence.layer import DistributedAttention

    spmdzero.init_distributed()
    with pytest.raises(SpmdZeroUsageError, match="processes share no rows"):
        DistributedAttention(None, dist.group.WORLD)
    with pytest.raises(SpmdZeroUsageError, match="has no streams"):
        DistributedAttention(None, None, sp_stream=object())
    with pytest.raises(SpmdZeroUsageError, match="rotary_pos_emb"):
        DistributedAttention(None, None)(*[torch.ones(1)] * 3, 0, (1, 2))


@pytest.mark.slow
def test_a_model_of_packed_documents_attends_within_each() -> None:
    """DeepSpeed drops the mask; here it is that of whole rows."""
    packed = rows_of_own_lengths()
    for each in packed:
        each["position_ids"] = (torch.arange(LENGTH) % 8).expand(ROWS, -1)
    found = []
    for mesh in ({"fsdp": 8}, {"fsdp": 4, "sequence": SHARED}):
        engine = started(mesh)
        found.append([engine.train_batch(iter([each])).item() for each in packed])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert trained(started({"fsdp": 8}), 1)[0] != found[0][0]
