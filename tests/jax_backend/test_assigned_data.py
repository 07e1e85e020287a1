"""`tensor.data = value` of another dtype or shape, on the devices."""

import pytest
import torch

import spmdzero
from spmdzero.backend import runtime
from spmdzero.backend.forms._said import said_of, say
from tests.support.engines import config


def test_data_may_become_of_another_dtype_or_shape() -> None:
    # As peft does with an adapter beside weights that rest on the devices in bf16.
    kept = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16).to(runtime.device()))
    kept.told = "by peft"  # type: ignore[attr-defined]
    named = kept
    kept.data = kept.data.to(torch.float32)
    assert (kept.dtype, kept.requires_grad, kept.told) == (torch.float32, True, "by peft")  # type: ignore[attr-defined]
    kept.data = torch.full((4,), 2.0).to(runtime.device())
    assert isinstance(kept, torch.nn.Parameter)
    assert kept is named
    kept.sum().backward()
    assert kept.grad is not None
    assert (kept.tolist(), kept.grad.tolist()) == ([2.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_what_was_said_of_a_tensors_values_is_not_said_of_others(shape: tuple[int, ...]) -> None:
    mask = torch.ones(2, 2).to(runtime.device())
    say(mask, "all ones")
    assert said_of(mask) == "all ones"
    mask.data = torch.zeros(shape).to(runtime.device())
    assert said_of(mask) is None


def test_an_engines_parameter_keeps_its_dtype() -> None:
    model = torch.nn.Linear(4, 4)
    spmdzero.initialize(model=model, config=config(bf16={"enabled": True}))
    with pytest.raises(RuntimeError, match=r"bfloat16 on xla:0 is assigned .* torch.float32"):
        model.weight.data = model.weight.data.float()
