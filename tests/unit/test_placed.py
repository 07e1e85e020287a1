"""A tensor that is placed by an annotation, and a module by propagation alone."""

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import current
from spmdzero.inspect import backend_name, place, propagated
from spmdzero.plan import MeshSpec

pytestmark = pytest.mark.backends("jax", "torch_xla")

HOST = torch.arange(16 * 32.0).reshape(16, 32)


@pytest.mark.parametrize(
    ("annotation", "mesh", "parts"),
    [
        (("fsdp", None), None, [HOST[2 * i : 2 * i + 2] for i in range(8)]),
        ((None, "fsdp"), None, [HOST[:, 4 * i : 4 * i + 4] for i in range(8)]),
        ((None, None), None, [HOST] * 8),
        (("data", None), MeshSpec((("data", 2), ("fsdp", 4))), [HOST[:8]] * 4 + [HOST[8:]] * 4),
    ],
)
def test_each_device_holds_the_part_that_the_annotation_gives_it(
    annotation: tuple[str | None, ...], mesh: MeshSpec | None, parts: list[torch.Tensor]
) -> None:
    held = spmdzero.local_shards(place(HOST, annotation, mesh))
    assert [part.tolist() for part in held] == [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("annotation", "mesh", "said"),
    [
        (("fsdp",), None, "has 1 entries, the tensor [16, 32] has 2 dims"),
        (("rows", None), None, "no axis 'rows': it has 'fsdp'"),
        ((None, "fsdp"), MeshSpec((("fsdp", 4),)), "has 4 devices, here are 8"),
    ],
)
def test_an_annotation_that_does_not_fit_is_refused(
    annotation: tuple[str | None, ...], mesh: MeshSpec | None, said: str
) -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError) as raised:
        place(HOST, annotation, mesh)
    assert said in str(raised.value)


def test_rows_that_the_devices_can_not_share_are_refused() -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"can't split dim 0 of \[9, 4\] evenly"):
        propagated(nn.Linear(4, 4), torch.zeros(9, 4))


def test_propagation_sums_gradients_and_gathers_what_mixes_rows() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (x.T @ x)

    linear = propagated(nn.Linear(64, 64), torch.randn(16, 64)).by_kind()
    assert linear == {"all-reduce": 2}
    assert propagated(Shuffled(), torch.randn(16, 64)).activations


def test_the_backend_has_its_name() -> None:
    assert backend_name() == current().name
