"""What the TPU's compiler makes of a ZeRO step: as recorded, and as ZeRO promises.

libtpu compiles here for chips that are elsewhere; tests/explain/golden.py records.
"""

from typing import Any

import pytest

from tests.explain.golden import BOTH, CASES, Case, compile_group, recorded

pytestmark = pytest.mark.slow

SHARDING = [case for case in CASES if case.stage > 0 and case.devices == 8]
ON_BOTH = [pytest.param(c, t, id=f"{c.name} {t}") for c in SHARDING for t in BOTH if t in c.tpu]
# The contract GPT's only sharded vector: libtpu combines vectors into one all-reduce.
VECTOR = "h.0.mlp.c_fc.bias"


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return {n: found for devices in (8, 16) for n, found in compile_group(devices).items()}


def rows_of(compiled: dict[str, Any], case: Case, target: str, role: str) -> list[Any]:
    boundary = compiled[case.name]["targets"][target]["programs"]["boundary"]
    return [row for row in boundary["collectives"] if row[0] == role]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_compilers_do_what_was_recorded(compiled: dict[str, Any], case: Case) -> None:
    assert compiled[case.name] == recorded(case)


@pytest.mark.parametrize(("case", "target"), ON_BOTH)
def test_each_sharded_matrix_is_reduce_scattered(
    compiled: dict[str, Any], case: Case, target: str
) -> None:
    assert compiled[case.name]["targets"][target]["refused"] == [VECTOR]
    kinds = {row[1] for row in rows_of(compiled, case, target, "gradient")}
    assert "reduce-scatter" in kinds


@pytest.mark.parametrize(("case", "target"), ON_BOTH)
def test_gradients_and_gathers_cross_in_the_models_dtype(
    compiled: dict[str, Any], case: Case, target: str
) -> None:
    dtype = {"fp32": "f32", "bf16": "bf16"}[case.dtype]
    for role in ("gradient", "parameter"):
        assert {row[2] for row in rows_of(compiled, case, target, role)} == {dtype}


@pytest.mark.parametrize(("case", "target"), ON_BOTH)
def test_what_moves_is_within_2_percent_of_the_floor_and_no_activation(
    compiled: dict[str, Any], case: Case, target: str
) -> None:
    found = compiled[case.name]["targets"][target]
    # Below 1 would be a ledger that misses something; the scalars and the one vector are over it.
    assert 0.9999 <= found["over_floor"] <= 1.02
    assert found["activations"] == 0


def test_stage_1_with_8_micro_batches_reduces_once(compiled: dict[str, Any]) -> None:
    (case,) = (case for case in CASES if case.micro_batches == 8)
    programs = compiled[case.name]["targets"]["v5e:2x4"]["programs"]
    assert programs["micro"]["runs"] == 7
    # The loss's mean over replicas.
    assert [row[0] for row in programs["micro"]["collectives"]] == ["output"]
    assert programs["boundary"]["runs"] == 1
    assert rows_of(compiled, case, "v5e:2x4", "gradient")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_compilers_inputs_are_the_plans_states(compiled: dict[str, Any], case: Case) -> None:
    found = compiled[case.name]
    for target in found["targets"].values():
        # Beside the states: the batch, scalars, and a vector's padding to its tile.
        assert target["arguments"] == pytest.approx(found["states"], rel=0.03)
