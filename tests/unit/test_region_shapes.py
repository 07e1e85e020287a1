"""Operations whose shape depends on data, where all replicas have the same shape."""

from collections.abc import Callable

import pytest
import torch
from region_harness import Apply, Probe, X, exactly, run
from torch import nn

from spmdzero.backend import Mesh
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")

Function = Callable[[torch.Tensor], torch.Tensor]


def one_of_each_row(x: torch.Tensor) -> torch.Tensor:
    """A mask that chooses one element of each row, at a place that differs between replicas."""
    place = ((x[:, :1] - x[:, :1] % 8) // 8) % 4
    return torch.arange(4, device=x.device)[None] == place


def put(x: torch.Tensor) -> torch.Tensor:
    x, mask = x.clone(), one_of_each_row(x)
    x[mask] = x[mask] * torch.tensor([2.0, 3.0], device=x.device)
    return x


def lengths(x: torch.Tensor) -> torch.Tensor:
    return (x[0, :2] * 0).long() + torch.tensor([1, 3], device=x.device)


# Each takes a replica's two rows.
SHARED: dict[str, Function] = {
    "a mask of elements": lambda x: x + x[one_of_each_row(x)][:, None],
    "a mask of rows": lambda x: x + x[x[:, 0] == x[:, 0].amax()],
    "a mask behind a slice": lambda x: x + x[:, one_of_each_row(x)[0]],
    "masked_select": lambda x: x + torch.masked_select(x, one_of_each_row(x))[:, None],
    "nonzero": lambda x: x + one_of_each_row(x).nonzero()[:, 1:],
    "where with one argument": lambda x: x + torch.where(one_of_each_row(x))[1][:, None],
    "masked assignment of many values": put,
    "repeat_interleave": lambda x: (
        x + torch.arange(2, device=x.device).repeat_interleave(lengths(x))
    ),
    "unique_consecutive": lambda x: x + torch.unique_consecutive(lengths(x))[:, None],
    "unique": lambda x: x + torch.unique(lengths(x))[:, None],
    "masked_scatter": lambda x: x.masked_scatter(one_of_each_row(x), x[:, 0] * 5),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_shape_that_replicas_share_is_that_of_each(name: str, mesh: Mesh) -> None:
    function = SHARED[name]
    expected = torch.cat([function(rows) for rows in X.split(2)])
    exactly(run(function, mesh, X), expected)


def test_a_gradient_passes_through_a_mask(mesh: Mesh) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale)[one_of_each_row(x)].mean()

    probe = Probe(Chosen(), mesh)
    probe.backward(probe(probe.batch(X)))
    plain = Chosen()
    plain(X).backward()
    torch.testing.assert_close(probe.gradients["scale"].cpu(), plain.scale.grad)


def test_shapes_that_differ_are_refused_with_what_differs(mesh: Mesh) -> None:
    with pytest.raises(ReplicaRegionError, match=r"replicas have different ones.*disagree"):
        run(lambda x: x + x[x > 3].sum(), mesh, X)


def test_the_count_follows_the_data(mesh: Mesh) -> None:
    probe = Probe(Apply(lambda x: x + x[x % 4 == 1].sum()), mesh)
    for rows in (X, X * 4 + 1):
        expected = torch.cat([each + each[each % 4 == 1].sum() for each in rows.split(2)])
        with torch.no_grad():
            assert torch.equal(probe(probe.batch(rows)).cpu(), expected)
