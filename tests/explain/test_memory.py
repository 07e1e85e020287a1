"""The compilers' count of a step's inputs against the plan's count of states, on 64 devices."""

import pytest

from spmdzero.explain import StageFit
from tests.explain.test_without_data import explained

pytestmark = pytest.mark.backends("jax")

GPT = ("tests.support.models:gpt", "examples/llama_7b.json")
BATCH = [f"--batch={name}={{devices}}x64:int64" for name in ("x", "y")]


def assert_counted(fit: StageFit, target: str) -> None:
    (memory,) = fit.compiled
    assert memory.target == target
    # Beside the states, an input is the batch, or a scalar such as the learning rate.
    assert memory.memory.arguments is not None
    assert fit.states <= memory.memory.arguments <= 1.03 * fit.states


@pytest.mark.slow
def test_on_64_chips_the_tpus_compiler_counts_the_plans_states_at_each_stage() -> None:
    explanation, _ = explained(*GPT, "--meta", *BATCH, "--tpu", "v5e:8x8")
    assert explanation.devices == 64
    for fit in explanation.fits:
        assert_counted(fit, "v5e:8x8")
    states = [fit.states for fit in explanation.fits]
    # 14 bytes a parameter against 2 + 12 / 64: parameters in bf16 are whole, master and moments in
    # fp32 are split, but for the small ones.
    assert 6.3 < states[0] / states[1] < 14 / (2 + 12 / 64)
    assert states[1] == states[2]


@pytest.mark.slow
def test_on_64_virtual_devices_xlas_cpu_compiler_counts_them_too() -> None:
    explanation, _ = explained(*GPT, "--own-stage", *BATCH, "--devices", "64")
    assert_counted(explanation.fit_at(2), "cpu:64")
