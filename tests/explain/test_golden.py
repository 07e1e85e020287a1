"""What the TPU's compiler makes of a ZeRO step: as recorded, and as ZeRO promises.

libtpu compiles here for chips that are elsewhere; tests/explain/golden.py records.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.explain.golden import (
    AT_ONCE,
    CASES,
    SCATTERING,
    Case,
    compile_together,
    of_its_targets,
    recorded,
)
from tests.support.selected import selected

pytestmark = [pytest.mark.backends("jax"), pytest.mark.slow]
(K8,) = (case for case in CASES if case.micro_batches == 8)
WHERE_IT_SCATTERS = [
    pytest.param(case, target, id=f"{case.name} {target}")
    for case in CASES
    for target in SCATTERING
    # There it sums most of ResNet's convolutions whole, as is recorded.
    if case.stage > 0 and target in case.tpu and (case.model, target) != ("resnet", "v5p:2x2x2")
]
# 6,912 elements: libtpu adds them to the one sum of all vectors.
TOO_SMALL = {"resnet": ["stem.weight"]}
EACH = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
SHARDED_AND_SCATTERED = pytest.mark.parametrize(("case", "target"), WHERE_IT_SCATTERS)


Found = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """Case -> what was explained of it; the selected ones of a model are compiled together."""
    chosen = selected(request)

    @functools.cache
    def group(model: str, devices: int) -> dict[str, Any]:
        mine = [case for case in chosen if (case.model, case.devices) == (model, devices)]
        return compile_together(mine, devices=devices)

    return lambda case: group(case.model, case.devices)[case.name]


def rows(explained: dict[str, Any], target: str, role: str) -> list[Any]:
    boundary = explained["targets"][target]["programs"]["boundary"]
    return [row for row in boundary["collectives"] if row[0] == role]


@EACH
def test_the_compilers_do_what_was_recorded(found: Found, case: Case) -> None:
    made, before = copy.deepcopy(found(case)), recorded(case)
    made["targets"] = of_its_targets(case, made)
    # Programs of torch_xla were recorded, which were given numbers of Python's, of 512 bytes each
    # on a TPU. JAX's have them as constants. All else is the same.
    if (case.model, case.dtype) == ("bert", "bf16"):
        # Over slices the sum of its loss goes with the vectors', and with the norm's by JAX.
        for targets in (made["targets"], before["targets"]):
            targets.pop("2xv5e:2x4", None)
    for name, target in before["targets"].items():
        more = target.pop("arguments") - made["targets"][name].pop("arguments")
        assert 0 <= more <= 20 * (512 if name in case.tpu else 4)
    assert made == before


@SHARDED_AND_SCATTERED
def test_gradients_are_reduce_scattered_in_the_models_dtype_near_the_floor(
    found: Found, case: Case, target: str
) -> None:
    explained = found(case)["targets"][target]
    small = TOO_SMALL.get(case.model, [])
    tensors = {row[1]: row[3] for row in rows(found(case), target, "gradient")}
    elements = {row[1]: row[4] for row in rows(found(case), target, "gradient")}
    assert tensors["reduce-scatter"] > 0
    if target in AT_ONCE:
        assert explained["refused"] == small
        assert tensors.get("all-reduce + slice", 0) == len(small)
    else:
        # One direction of the torus after another, it sums positions' vectors and the like whole.
        assert elements.get("all-reduce + slice", 0) < 0.01 * sum(elements.values())
    dtype = {"fp32": "f32", "bf16": "bf16"}[case.dtype]
    for role in ("gradient", "parameter"):
        assert {row[2] for row in rows(found(case), target, role)} == {dtype}
    # Below 1 would be a ledger that misses something; the scalars are over it.
    assert 0.9999 <= explained["over_floor"] <= 1.02


@EACH
def test_no_activation_moves_nothing_is_in_a_loop_and_the_inputs_are_the_plans_states(
    found: Found, case: Case
) -> None:
    """XLA's while-loop-all-reduce-code-motion spoils embedding gradients that accumulate in a loop.

    https://github.com/openxla/xla/issues/49143; what accumulates here does so between programs.
    """
    assert found(case)["findings"] == []
    for target in found(case)["targets"].values():
        assert (target["activations"], target["in_loops"]) == (0, 0)
        # Beside the states: the batch, scalars, and a vector's padding to its tile.
        assert target["arguments"] == pytest.approx(found(case)["states"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("case", [K8], ids=["k8"])
def test_stage_1_with_8_micro_batches_reduces_once(found: Found, case: Case) -> None:
    for target in case.tpu:
        programs = found(case)["targets"][target]["programs"]
        assert programs["micro"]["runs"] == 7
        # The loss's mean over replicas.
        assert [row[0] for row in programs["micro"]["collectives"]] == ["output"]
        assert programs["boundary"]["runs"] == 1
        assert rows(found(case), target, "gradient")
