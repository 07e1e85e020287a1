"""What is searched: all that a JSON leaves open, and nothing that it names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from spmdzero import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.config import load_config
from spmdzero.engine import plan_of
from spmdzero.explain import Topology
from spmdzero.nn import linear_cross_entropy
from spmdzero.plan import Role
from spmdzero.search._asked import Asked, asked_for
from spmdzero.search._funnel import unshared
from spmdzero.search._knobs import CONTEXT, CONTEXT_ON_HOST, Blocks, Candidate, Stays
from spmdzero.search._learnt import Seen, predicted
from spmdzero.search._model import Forward, seen_forward
from spmdzero.search._plan_for import _launch
from spmdzero.search._result import TrainingPlan
from spmdzero.search._rough import Estimate, Rough
from spmdzero.search._space import own_candidate, space
from tests.search.models import CONFIG, LENGTH, ROWS, WIDTH, WORDS, Net, tokens

pytestmark = pytest.mark.backends("jax")

V5E = Topology.parse("v5e:2x4")


def net(**sizes: int) -> Net:
    with torch.device("meta"):
        return Net(**sizes)


def seen(model: nn.Module, *, length: int) -> tuple[Asked, Forward]:
    """A language model of transformers in bf16, with a step of 16 rows."""
    rows = torch.zeros(16, length, dtype=torch.long, device="meta")
    batch = {"input_ids": rows, "labels": rows}
    asked = asked_for({**CONFIG, "bf16": {"enabled": True}}, batch, global_batch=None)
    return asked, seen_forward(model, asked)


def searched(
    config: dict[str, Any] | None = None, *, rows: int = ROWS, global_batch: int | None = None,
    topology: Topology = V5E,
) -> tuple[Asked, Forward, list[Candidate]]:  # fmt: skip
    asked = asked_for({**CONFIG, **(config or {})}, tokens(rows), global_batch=global_batch)
    forward = seen_forward(net(), asked)
    return asked, forward, space(asked, topology, forward=forward)


def test_every_way_has_all_rows_and_a_config_that_is_taken() -> None:
    asked, forward, candidates = searched()
    assert len(candidates) > 1000
    for candidate in candidates:
        replicas = 8 // (candidate.sequence * candidate.tensor)
        assert candidate.rows * candidate.accumulation * replicas == ROWS
    # One of each kind: a loop over all would take minutes.
    refused = set[int]()
    for placing in {candidate.placing: candidate for candidate in candidates}.values():
        config = asked.config_of(placing.keys(blocks=forward.blocks))
        try:
            plan_of(load_config(config), net(), devices=8)
        except SpmdZeroConfigError:
            refused.add(placing.tensor)
    # Nothing says how a tensor axis splits this model.
    assert refused == {2, 4, 8}


@pytest.mark.parametrize(
    ("named", "of"),
    [
        ({"zero_optimization": {"stage": 2}}, lambda c: c.stage == 2 and c.group == 1),
        ({"train_micro_batch_size_per_gpu": 2}, lambda c: c.rows == 2),
        ({"gradient_accumulation_steps": 4}, lambda c: c.accumulation == 4),
        ({"spmd": {"mesh": {"fsdp": 8}}}, lambda c: (c.data, c.sequence, c.tensor) == (1, 1, 1)),
        ({"spmd": {"mesh": {"data": 2, "fsdp": -1}}}, lambda c: c.data == 2),
        ({"spmd": {"scan": "on"}}, lambda c: c.scan),
        ({"spmd": {"recompute": "nothing"}}, lambda c: c.recompute == "nothing"),
        ({"spmd": {"xla_flags": "auto"}}, lambda c: c.flags == "auto"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
          "offload_optimizer": {"device": "cpu"}}}, lambda c: c.host == ("optimizer", "param")),
    ],
)  # fmt: skip
def test_what_the_json_names_is_kept_and_all_else_is_searched(named: Any, of: Any) -> None:
    rows = 32 if "gradient_accumulation_steps" not in named else None
    _, _, candidates = searched(named, global_batch=rows)
    assert all(map(of, candidates))
    assert len(candidates) > 20


def test_auto_is_searched() -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "zero_optimization": {"stage": "auto"},
    }  # fmt: skip
    assert searched(auto)[2] == searched()[2]


def test_a_value_that_is_not_searched_stands_in_every_config() -> None:
    blocks = {"blocks.0": "nothing", "blocks.*": "everything"}
    asked, forward, candidates = searched({"spmd": {"recompute": blocks}})
    assert candidates
    for candidate in candidates[:50]:
        config = asked.config_of(candidate.keys(blocks=forward.blocks))
        assert config["spmd"]["recompute"] == blocks
    assert {candidate.recompute for candidate in candidates} == {"nothing"}


def test_dtypes_of_states_are_kept_and_counted() -> None:
    def moments(dtypes: dict[str, str]) -> int:
        asked, forward, candidates = searched({"spmd": {"moments": dtypes}})
        assert len(candidates) > 1000
        config = asked.config_of(candidates[0].keys(blocks=forward.blocks))
        assert config["spmd"]["moments"] == dtypes
        return plan_of(load_config(config), net(), devices=8).memory()[Role.MOMENT]

    assert moments({"exp_avg": "bfloat16"}) * 4 == moments({}) * 3


def test_what_the_json_says_stays_as_it_was_written() -> None:
    section = {"device": "cpu", "pin_memory": True}
    said = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2, "offload_optimizer": section, "overlap_comm": True},
        "spmd": {"mesh": {"fsdp": 8}},
    }
    asked, forward, candidates = searched(said)
    made = asked.json_of(candidates[0].keys(blocks=forward.blocks))
    assert made["optimizer"] == said["optimizer"]
    assert made["gradient_clipping"] == "auto"
    assert made["zero_optimization"] == said["zero_optimization"]
    assert made["spmd"]["mesh"] == {"fsdp": 8}
    assert made["train_micro_batch_size_per_gpu"] == candidates[0].rows
    assert any("per_device_train_batch_size" in note for note in asked.notes)
    bare = asked_for({"bf16": {"enabled": True}}, tokens(), global_batch=None)
    # The script's optimizer is the script's.
    assert "optimizer" not in bare.json_of(candidates[0].keys(blocks=forward.blocks))


def test_the_own_json_has_defaults_for_what_it_does_not_name() -> None:
    asked, _, candidates = searched({"zero_optimization": {"stage": 1}})
    own = own_candidate(asked, candidates)
    assert own == Candidate(stage=1, rows=4, accumulation=1)


def test_a_batch_that_no_mesh_divides_is_refused_with_one_that_does() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"7 rows .* 16 devices .*--global-batch 8\b"):
        searched(rows=7, topology=Topology.parse("v5e:4x4"))
    with pytest.raises(SpmdZeroUsageError, match="what the JSON names"):
        searched({"train_micro_batch_size_per_gpu": 3})


def test_numbers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"train_batch_size.*--global-batch is 64"):
        searched({"train_batch_size": 32}, global_batch=64)
    with pytest.raises(SpmdZeroConfigError, match="stage"):
        searched({"zero_optimization": {"stage": 7}})
    with pytest.raises(SpmdZeroUsageError, match="no tensors"):
        asked_for(CONFIG, {}, global_batch=None)


def test_a_forward_is_counted() -> None:
    asked = asked_for(CONFIG, tokens(), global_batch=None)
    forward = seen_forward(net(), asked)
    assert forward.blocks == Blocks(name="blocks", count=4)
    block, head = 2 * 2 * WIDTH * 4 * WIDTH, 2 * WIDTH * WORDS
    assert forward.block_flops == 4 * block * LENGTH
    assert forward.flops == (4 * block + head) * LENGTH
    assert forward.block_inputs == 4 * 4 * WIDTH * LENGTH
    # A block keeps its input, the norm's output, its statistics, and the wide value before the
    # activation function, which torch keeps once, as its result.
    wide, narrow = 4 * 4 * WIDTH * LENGTH, 4 * WIDTH * LENGTH
    assert wide + 2 * narrow < forward.block_kept / 4 < 2 * wide + 3 * narrow
    assert forward.logits >= 4 * WORDS * LENGTH
    assert (forward.fuses, forward.pairs) == (False, 0)


def test_attention_is_counted_as_a_kernel_that_holds_no_pairs() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True).mean()

    x = torch.empty(8, 2, 512, 64, device="meta", requires_grad=True)
    forward = seen_forward(Attends(), asked_for(CONFIG, x, global_batch=None))
    assert forward.flops == 2 * (2 * 512 * 512 * 64) * 2 / 2
    assert forward.pairs == 2 * 2 * 512 * 512 * 4
    assert (forward.contexts, forward.context_flops) == (0, 0)
    assert forward.kept < forward.pairs / 2


def test_a_language_model_of_transformers_has_a_loss_without_logits() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=512))
    batch = {name: tokens() for name in ("input_ids", "labels")}
    forward = seen_forward(model, asked_for(CONFIG, batch, global_batch=None))
    assert forward.fuses
    assert forward.blocks == Blocks(name="transformer.h", count=4)
    assert forward.contexts == 4 * 4 * 64 * LENGTH
    assert 0 < forward.context_flops < forward.block_flops
    assert forward.logits >= 4 * 512 * LENGTH


def test_a_forward_asks_tensors_without_values_for_a_device_that_torch_has() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.tied = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, WORDS)
            self.tied.weight = self.head.weight
            self.turns = torch.empty(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # torch has no autocast for "meta".
            with torch.autocast(x.device.type, enabled=False):
                hidden = x * self.turns
            labels = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
            return linear_cross_entropy(hidden, self.head.weight, labels) + self.tied(x).mean()

    with torch.device("meta"):
        model, x = Head(), torch.empty(ROWS, WIDTH)
    forward = seen_forward(model, asked_for(CONFIG, x, global_batch=None))
    # The loss multiplies for both gradients too.
    assert forward.flops == (3 + 1) * 2 * WIDTH * WORDS
    assert model.turns.is_meta


def test_a_forward_that_reads_values_is_refused() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).mean()
            return y if y.item() > 0 else -y

    with torch.device("meta"):
        model = Reads(4, 4)
    asked = asked_for(CONFIG, torch.empty(8, 4, device="meta"), global_batch=None)
    with pytest.raises(SpmdZeroUsageError, match="forward of Reads doesn't run with tensors that"):
        seen_forward(model, asked)


def estimated(candidate: Candidate, *, blocks: int = 8, width: int = 4096) -> Rough:
    model = net(width=width, blocks=blocks)
    asked = asked_for({**CONFIG, "bf16": {"enabled": True}}, tokens(1024), global_batch=None)
    forward = seen_forward(model, asked)
    found = Estimate(asked, model, forward, V5E)(candidate)
    assert found is not None
    return found


def test_an_estimate_orders_memory_as_the_plan_does() -> None:
    stages = [estimated(Candidate(stage=s, rows=8, accumulation=16)) for s in range(4)]
    states = [rough.states for rough in stages]
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4
    plain = Candidate(stage=2, rows=128, accumulation=1)
    again = Candidate(stage=2, rows=128, accumulation=1, recompute="everything")
    assert estimated(again).rest < estimated(plain).rest / 2
    assert estimated(again).seconds > estimated(plain).seconds
    host = Candidate(stage=2, rows=128, accumulation=1, host=("optimizer",))
    assert estimated(host).states < estimated(plain).states
    assert estimated(host).seconds > estimated(plain).seconds


def test_what_attention_returns_can_stay_where_all_else_is_computed_again() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=8, n_embd=1024, n_head=8, vocab_size=512, n_positions=4096)
        )
    asked, forward = seen(model, length=4096)
    candidates = space(asked, V5E, forward=forward)
    named = {(c.recompute, c.scan): c for c in candidates if isinstance(c.recompute, Stays)}
    assert set(named) == {(CONTEXT, False), (CONTEXT, True), (CONTEXT_ON_HOST, True)}
    assert all(candidate.attention == "auto" for candidate in named.values())
    keys = named[CONTEXT_ON_HOST, True].keys(blocks=forward.blocks)
    assert keys["spmd.recompute"] == {"offload": ["context"]}
    assert load_config(asked.config_of(keys)).spmd.recompute == {"offload": ["context"]}

    estimate = Estimate(asked, model, forward, V5E)

    def of(policy: str | Stays) -> Rough:
        found = estimate(
            Candidate(stage=2, rows=2, accumulation=1, recompute=policy, scan=True)
        )  # fmt: skip
        assert found is not None
        return found

    again, kept, there = map(of, ("everything", CONTEXT, CONTEXT_ON_HOST))
    assert again.rest == there.rest < kept.rest
    # Where there is room, the host has no part in it.
    assert kept.seconds <= there.seconds < again.seconds


def test_each_linear_layer_of_a_block_may_stay_beside_attention() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=4, hidden_size=256, intermediate_size=512, vocab_size=512,
                num_attention_heads=2, num_key_value_heads=1, use_cache=False,
            )
        )  # fmt: skip
    asked, forward = seen(model, length=128)
    q, k, *_ = forward.products
    assert (q.name, q.bytes, q.flops) == ("q_proj", 4 * 128 * 256 * 2, 4 * 2 * 128 * 256 * 256)
    assert (k.name, k.bytes) == ("k_proj", q.bytes / 2)
    candidates = space(asked, V5E, forward=forward)
    stay = list(dict.fromkeys(c.recompute for c in candidates if isinstance(c.recompute, Stays)))
    names = ("context", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    assert [s.names for s in stay if not s.on_host] == [names[:n] for n in range(1, 8)]
    estimate = Estimate(asked, model, forward, V5E)
    found = [
        estimate(Candidate(stage=2, rows=2, accumulation=1, recompute=s, scan=True))
        for s in stay if not s.on_host
    ]  # fmt: skip
    rest = [rough.rest for rough in found if rough is not None]
    assert len(rest) == 7
    assert rest == sorted(set(rest))
    # The names are those of a config that trains.
    keys = Candidate(stage=2, rows=2, accumulation=1, recompute=stay[-1]).keys(
        blocks=forward.blocks
    )
    assert load_config(asked.config_of(keys)).spmd.recompute == stay[-1].policy


def test_an_axis_that_exchanges_activations_stays_within_a_host() -> None:
    largest = {}
    for name in ("v6e:2x4", "v6e:2x4,hosts=2", "tpu7x:2x2x1"):
        _, _, candidates = searched(topology=Topology.parse(name))
        largest[name] = max(candidate.tensor for candidate in candidates)
    # A host of tpu7x has four chips of two devices each.
    assert largest == {"v6e:2x4": 8, "v6e:2x4,hosts=2": 4, "tpu7x:2x2x1": 8}


def test_two_hosts_of_four_chips_are_started_as_nodes_of_a_cluster() -> None:
    one, two = (list(_launch(Topology.parse(name))) for name in ("v6e-8", "v6e-8,hosts=2"))
    assert "--accelerator-type=v6e-8 " in one[0]
    assert one[1].endswith("# on the slice's host")
    assert two[0].endswith("--machine-type=ct6e-standard-4t --num-nodes=2 --tpu-topology=2x4")
    assert two[1].endswith("# on each of 2 hosts")


def test_tpu7x_is_started_without_cloud_tpus_own_api_which_does_not_have_it() -> None:
    one, two = (list(_launch(Topology.parse(name))) for name in ("tpu7x-8", "tpu7x:2x2x2"))
    assert one[0].endswith("--machine-type=tpu7x-standard-4t --num-nodes=1")
    assert one[1].endswith("# on the host")
    assert two[0].endswith(
        "workload-policy POLICY --type=HIGH_THROUGHPUT --accelerator-topology=2x2x2"
    )
    assert two[1].endswith(
        "--machine-type=tpu7x-standard-4t --num-nodes=2 --placement-policy=POLICY"
    )
    assert two[2].endswith("# on each of 2 hosts")
    assert not any("tpu-vm" in line for line in (*one, *two))


def test_what_was_compiled_corrects_its_like_most() -> None:
    rough = Rough(states=100, rest=1000.0, seconds=1.0)
    one = Candidate(stage=2, rows=4, accumulation=1)
    seen = [Seen(candidate=one, rough=rough, seconds=2.0, peak=600)]
    same = predicted(one, rough, seen)
    assert same.seconds == pytest.approx(2.0, rel=0.02)
    assert same.rest == pytest.approx(500, rel=0.02)
    # Where nothing else is known, all are off as much.
    far = Candidate(stage=3, rows=4, accumulation=1, scan=True)
    assert predicted(far, rough, seen).seconds == pytest.approx(2.0)
    other = Candidate(stage=3, rows=4, accumulation=1)
    seen.append(Seen(candidate=other, rough=rough, seconds=0.5, peak=600))
    assert predicted(one, rough, seen).seconds > 1 > predicted(far, rough, seen).seconds
    late = predicted(one, rough, seen, refused=[one]).seconds
    assert late > 10 * predicted(one, rough, seen).seconds


def test_the_json_to_use_has_comments_and_the_file_none(tmp_path: Path) -> None:
    hjson = pytest.importorskip("hjson")
    config = {"zero_optimization": {"stage": 3}, "spmd": {"mesh": {"fsdp": -1, "data": 2}}}
    plan = TrainingPlan(
        slice="v5e:2x4", model="Net", step="8 rows", counted="token", ways=(), config=config,
        reasons={"zero_optimization.stage": "sharded", "spmd.mesh": "axes"},
    )  # fmt: skip
    assert '"stage": 3  // sharded' in plan.commented()
    assert '"mesh": {  // axes' in plan.commented()
    assert hjson.loads(plan.commented()) == config
    plan.write(tmp_path / "ds.json")
    assert json.loads((tmp_path / "ds.json").read_text()) == config
    assert TrainingPlan.from_json(plan.to_json()) == plan
    none = TrainingPlan(slice="v5e:1x1", model="Net", step="", counted="token", ways=(),
                        larger="v5e:2x2")  # fmt: skip
    with pytest.raises(SpmdZeroUsageError, match=r"nothing fits v5e:1x1.*v5e:2x2"):
        none.write(tmp_path / "ds.json")


def test_the_space_of_a_large_slice_is_thousands_and_no_more() -> None:
    _, _, candidates = searched(rows=1024, topology=Topology.parse("v5p:4x4x4"))
    assert 1000 < len(candidates) < 100_000
    assert math.prod(V5E.shape) == 8


def test_a_way_without_shared_replicas_comes_second_where_the_first_shares_them() -> None:
    rough = Rough(states=1, rest=1.0, seconds=1.0)
    alone, shared = (Candidate(stage=2, rows=2, accumulation=1, tensor=n) for n in (1, 2))
    ways = {alone: rough, shared: rough}

    def seen_of(candidate: Candidate) -> Seen:
        return Seen(candidate=candidate, rough=rough, seconds=1.0, peak=1)

    assert unshared(ways, []) == {}
    assert list(unshared(ways, [seen_of(shared)])) == [alone]
    assert unshared(ways, [seen_of(shared), seen_of(alone)]) == {}
    assert unshared({shared: rough}, [seen_of(shared)]) == {}
