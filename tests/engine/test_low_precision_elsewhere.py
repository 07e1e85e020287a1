"""Keys of 8 bits on torch_xla, whose programs have none."""

from typing import Any

import pytest
from torch import nn

from spmdzero.errors import SpmdZeroConfigError
from tests.support import engines

pytestmark = pytest.mark.backends("torch_xla")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"spmd": {"products": {"dtype": "fp8"}}}, "spmd.products = 'fp8'"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights = True",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_quantized_gradients = True",
        ),
    ],
)
def test_keys_of_8_bits_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpmdZeroConfigError, match=f"{said}.*torch_xla.*jax"):
        engines.start(nn.Linear(128, 128), **config)
