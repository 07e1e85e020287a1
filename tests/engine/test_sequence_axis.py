"""The mesh axes sequence and tensor where the backend's region leaves none to the compiler."""

import pytest
from torch import nn

import spmdzero
from spmdzero.backend import current
from spmdzero.compat import parallel_state_sp
from spmdzero.errors import SpmdZeroConfigError

pytestmark = pytest.mark.backends("any")


@pytest.mark.parametrize(
    ("axis", "more"),
    [
        ("sequence", {"sequence_parallel_size": 2}),
        ("sequence", {"spmd": {"mesh": {"fsdp": -1, "sequence": 2}}}),
        ("tensor", {"tensor_parallel": {"autotp_size": 2}}),
        ("tensor", {"spmd": {"mesh": {"fsdp": -1, "tensor": 2}}}),
    ],
)
def test_the_axis_is_refused_by_name(axis: str, more: dict[str, object]) -> None:
    if current().name == "jax":
        pytest.skip("JAX has the axis")
    with pytest.raises(SpmdZeroConfigError, match=f"leaves none, such as {axis}, to the compiler"):
        spmdzero.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 8, **more})


def test_ulysses_is_refused_when_the_engine_is_made() -> None:
    if current().name == "jax":
        pytest.skip("JAX has the axis")
    parallel_state_sp.initialize_sequence_parallel(2)
    try:
        with pytest.raises(SpmdZeroConfigError, match="leaves none, such as sequence"):
            spmdzero.initialize(
                model=nn.Linear(2, 2), config={"train_batch_size": 8}, mpu=parallel_state_sp
            )
    finally:
        parallel_state_sp._release_sequence_parallel_groups()
