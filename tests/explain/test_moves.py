"""The floor of what ZeRO moves, why a reduce-scatter was refused, and the roofline."""

import math

import pytest

from spmdzero.explain import CHIPS, Topology
from spmdzero.explain._explanation import _by_reason
from spmdzero.explain._moves import ProgramLedger, floor_elements, measure_moves
from spmdzero.explain._refused_scatters import refused_scatters
from spmdzero.explain._roofline import roofline
from spmdzero.inspect import Collective, CollectiveLedger
from spmdzero.plan import MeshSpec, ParamSpec, ShardingPlan

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

WEIGHT, BIAS = 1024 * 512, 4096


def plan(stage: int, *, devices: int = 8, micro_batches: int = 1, group: int = 1) -> ShardingPlan:
    return ShardingPlan.build(
        [
            ParamSpec(name="weight", shape=(1024, 512), dtype="bfloat16", trainable=True),
            ParamSpec(name="bias", shape=(4096,), dtype="bfloat16", trainable=True),
            ParamSpec(name="norm", shape=(512,), dtype="bfloat16", trainable=True),
            ParamSpec(name="frozen", shape=(512, 512), dtype="bfloat16", trainable=False),
        ],
        stage=stage,
        mesh=MeshSpec.resolve({"fsdp": -1}, device_count=devices, group=group),
        master=True,
        moments=("exp_avg", "exp_avg_sq"),
        accumulator_dtype=None,
        accumulation_steps=micro_batches,
    )


def reduction(tensor: str, shape: tuple[int, ...], kind: str = "all-reduce") -> Collective:
    size = 2 * math.prod(shape)
    return Collective(
        kind=kind, dtype="bf16", shape=shape, bytes=size, wire_bytes=size, host_bytes=0,
        group_size=8, scattered=True, asynchronous=False, in_loop=False, turns=1, role="gradient",
        tensor=tensor, op_name="", source="",
    )  # fmt: skip


def test_floor_is_two_psi_of_what_is_trained_and_at_stage_2_one_more_a_micro_batch() -> None:
    sharded, whole = WEIGHT + BIAS, 512
    for stage in (0, 1, 2):
        assert floor_elements(plan(stage)) == 2 * (sharded + whole) * 7 // 8
    # (K+1)Ψ(N-1)/N; the small tensor stays whole, so each of its reductions is an all-reduce.
    assert floor_elements(plan(2, micro_batches=4)) == (5 * sharded + 8 * whole) * 7 // 8
    assert floor_elements(plan(1, micro_batches=4)) == floor_elements(plan(1))


def test_floor_at_stage_3_is_a_reduction_and_two_gathers_and_the_gathers_of_what_is_frozen() -> (
    None
):
    trained, frozen = WEIGHT + BIAS, 512 * 512
    # The small one stays whole, so its reduction is an all-reduce.
    assert floor_elements(plan(3)) == (3 * trained + 2 * 512 + 2 * frozen) * 7 // 8
    four = 4 * (3 * trained + 2 * 512 + 2 * frozen)
    assert floor_elements(plan(3, micro_batches=4)) == four * 7 // 8


def test_floor_of_groups_is_the_gathers_within_them_and_one_between_them() -> None:
    trained, frozen = WEIGHT + BIAS, 512 * 512
    within, between, summed = 2 * 6, 1, 7
    eighths = trained * (summed + within + between) + 512 * 2 * summed + frozen * within
    assert floor_elements(plan(3, group=4)) == eighths // 8
    four = trained * (4 * (summed + within) + between) + 4 * (512 * 2 * summed + frozen * within)
    assert floor_elements(plan(3, group=4, micro_batches=4)) == four // 8


def test_refused_gradients_are_problems_where_they_cost_something() -> None:
    topology = Topology.parse("v5e:4x4")
    weight, bias = reduction("weight", (1024, 512)), reduction("bias", (4096,))

    def cost(*collectives: Collective) -> float:
        ledger = CollectiveLedger(collectives=collectives, aliased=0, parameters=(), named=True)
        return measure_moves(
            plan(2, devices=16), [ProgramLedger(kind="boundary", runs=3, ledger=ledger)], stray=(),
            target=topology.name, topology=topology,
        ).cost_of_refused  # fmt: skip

    assert cost(weight, bias) == 0.5
    scattered = reduction("weight", (1024, 512), "reduce-scatter")
    assert cost(scattered, bias) == pytest.approx(0.5 * BIAS / (WEIGHT + BIAS))
    assert cost(scattered) == 0
    lines = _by_reason(refused_scatters(plan(2, devices=16), [weight, bias], topology=topology))
    (line,) = lines
    assert line.startswith("weight and 1 more: one mesh axis spans all of v5e:4x4")


@pytest.mark.parametrize(
    ("name", "fix"),
    [("v5e:4x4", '"reduction": "auto"'), ("2xv5e:4x4", '"mesh": {"data": 4, "fsdp": -1}')],
)
def test_a_whole_square_slice_is_refused_for_its_topology_with_what_restores_it(
    name: str, fix: str
) -> None:
    topology = Topology.parse(name)
    weight, bias = reduction("weight", (1024, 512)), reduction("bias", (4096,))
    refused = refused_scatters(plan(2, devices=16), [weight, bias], topology=topology)
    assert [r.tensor for r in refused] == ["weight", "bias"]
    assert all("N-D all-reduce" in r.reason for r in refused)
    assert fix in refused[0].fix


@pytest.mark.parametrize(
    ("stage", "fix"), [(2, '{"data": 2, "fsdp": -1}'), (3, '{"zero_hpz_partition_size": 8}')]
)
def test_a_gradient_that_slices_scatter_and_gather_again_is_refused(stage: int, fix: str) -> None:
    made = [reduction("weight", (1024, 512), kind) for kind in ("reduce-scatter", "all-gather")]
    topology = Topology.parse("2xv5e:2x4")
    (refused,) = refused_scatters(plan(stage, devices=16), made, topology=topology)
    assert refused.tensor == "weight"
    assert "spans the slices" in refused.reason
    assert fix in refused.fix


def test_a_refused_gradient_of_equal_blocks_is_found_by_their_common_name() -> None:
    blocks = [
        ParamSpec(name=f"blocks.{i}.w", shape=(1024, 512), dtype="bfloat16", trainable=True)
        for i in range(2)
    ]
    mesh = MeshSpec.resolve({"fsdp": -1}, device_count=8)
    made = ShardingPlan.build(
        blocks, stage=2, mesh=mesh, master=True, moments=(), accumulator_dtype=None,
        accumulation_steps=1,
    )  # fmt: skip
    looped = reduction("blocks.*.w", (1024, 512))
    (refused,) = refused_scatters(made, [looped], topology=Topology.parse("v5e:2x4"))
    assert refused.tensor == "blocks.*.w"


def test_a_vector_is_refused_for_being_one() -> None:
    gradients = [reduction("weight", (1024, 512), "reduce-scatter"), reduction("bias", (4096,))]
    (refused,) = refused_scatters(plan(2), gradients, topology=Topology.parse("v5e:2x4"))
    assert (refused.tensor, refused.bytes) == ("bias", 2 * BIAS)
    assert "vectors" in refused.reason
    assert '"min_shard_elements": 4097' in refused.fix


def test_a_small_matrix_is_given_the_flags_that_were_seen_to_restore_it() -> None:
    (refused,) = refused_scatters(
        plan(2), [reduction("weight", (1024, 512))], topology=Topology.parse("v6e:2x4")
    )
    assert "xla_tpu_use_minor_sharding_for_major_trivial_input=true" in refused.fix


def test_a_gradient_that_the_plan_keeps_whole_is_not_refused() -> None:
    topology = Topology.parse("v5e:2x4")
    assert refused_scatters(plan(2), [reduction("norm", (512,))], topology=topology) == ()
    whole = [reduction("weight", (1024, 512))]
    assert refused_scatters(plan(0), whole, topology=topology) == ()


def test_a_step_is_bound_by_the_longest_of_its_three_times() -> None:
    longest = {"flops": "compute", "bytes_accessed": "memory", "wire_bytes": "network"}
    for count, bound in longest.items():
        counts = dict.fromkeys(longest, 1.0) | {count: 1e12}
        line = roofline(
            CHIPS["v5e"], target="v5e:2x4", tokens=64, matmul_flops=1.0, peak=197e12, **counts
        )
        assert line.bound == bound


def test_network_hides_from_the_tokens_that_make_compute_as_long() -> None:
    chip = CHIPS["v5e"]
    # 64 tokens take 1 ms of matrix products, the network 4 ms: it hides from 256 tokens on.
    line = roofline(
        chip, target="v5e", flops=chip.bf16_flops * 2e-3, matmul_flops=chip.bf16_flops * 1e-3,
        bytes_accessed=None, wire_bytes=chip.ici_rate * 4e-3, tokens=64,
        peak=chip.bf16_flops,
    )  # fmt: skip
    assert line.hiding_tokens == 256
    assert (line.memory, line.compiled) == (None, False)


def test_compute_is_rated_at_the_peak_of_what_is_multiplied() -> None:
    chip = CHIPS["v5e"]
    assert chip.int8_flops is not None
    counts = {"flops": 394e9, "matmul_flops": 394e9, "wire_bytes": chip.ici_rate * 4e-3}
    lines = [
        roofline(chip, target="v5e", bytes_accessed=None, tokens=64, peak=peak, **counts)
        for peak in (chip.bf16_flops, chip.int8_flops)
    ]
    assert [line.compute for line in lines] == [pytest.approx(2e-3), pytest.approx(1e-3)]
    # What computes in half of the time hides the same bytes from twice as many tokens on.
    assert [line.hiding_tokens for line in lines] == [128, 256]


@pytest.mark.parametrize(("shared", "hiding"), [(0.5e-3, 448), (1e-3, None), (2e-3, None)])
def test_bytes_that_grow_with_the_tokens_hide_less(shared: float, hiding: int | None) -> None:
    chip = CHIPS["v5e"]
    # Of the 1 ms of products of 64 tokens, half a ms is left for the other 3.5 ms of the network.
    line = roofline(
        chip, target="v5e", flops=chip.bf16_flops * 2e-3, matmul_flops=chip.bf16_flops * 1e-3,
        bytes_accessed=None, wire_bytes=chip.ici_rate * 4e-3, tokens=64,
        peak=chip.bf16_flops, shared_bytes=chip.ici_rate * shared,
    )  # fmt: skip
    assert line.hiding_tokens == hiding
