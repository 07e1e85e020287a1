"""How the chips are joined, from what JAX says of its devices."""

import dataclasses
import itertools

import pytest

from spmdzero.backend.jax.axes._slice import torus_of


@dataclasses.dataclass
class Chip:
    """What JAX says of a device."""

    coords: tuple[int, ...]
    slice_index: int = 0


def slice_of(x: int, y: int, z: int) -> list[Chip]:
    """The chips of a slice, by hosts of 2 x 2, as libtpu lists them."""
    hosts = itertools.product(range(z), range(0, y, 2), range(0, x, 2))
    return [Chip((px + i, py + j, pz)) for pz, py, px in hosts for j in (0, 1) for i in (0, 1)]


@pytest.mark.parametrize("torus", [(2, 2, 1), (4, 4, 1), (2, 2, 4), (4, 4, 4)], ids=str)
def test_a_slice_is_told_by_its_chips_places(torus: tuple[int, int, int]) -> None:
    assert torus_of(slice_of(*torus)) == torus


@pytest.mark.parametrize(
    "chips",
    [
        slice_of(4, 4, 1)[:-1],
        [Chip((0, 0, 0)), Chip((1, 0, 0), slice_index=1)],
        [Chip((0, 0, 0)), Chip((0, 0, 0))],
        [object()],
    ],
    ids=["with a hole", "two slices", "two devices a chip", "without coordinates"],
)
def test_what_is_no_filled_slice_has_no_torus(chips: list[Chip]) -> None:
    assert torus_of(chips) is None
