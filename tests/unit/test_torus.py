"""The shape of a slice: which reduce-scatters it has, and how torch_xla's figures tell it."""

import pytest

from spmdzero.backend import Torus, scatter_steps, scatters_whole
from spmdzero.backend.torch_xla.runtime import torus_of

pytestmark = pytest.mark.backends("torch_xla")


@pytest.mark.parametrize("torus", [(8,), (2, 2), (2, 4), (4, 8), (8, 16), (2, 2, 1)])
def test_a_row_and_a_plane_of_unequal_sides_scatter_at_once(torus: Torus) -> None:
    assert scatters_whole(torus)
    assert len(scatter_steps(torus)) == 1


@pytest.mark.parametrize(
    ("torus", "steps"),
    [((4, 4), (4, 4)), ((2, 2, 2), (2, 2, 2)), ((2, 2, 4), (4, 2, 2)), ((16, 16), (16, 16))],
)
def test_a_square_and_a_cube_scatter_direction_by_direction_the_last_first(
    torus: Torus, steps: tuple[int, ...]
) -> None:
    assert not scatters_whole(torus)
    assert scatter_steps(torus) == steps


def attributes(*coords: tuple[int, ...], **more: int) -> list[dict[str, object]]:
    return [{"name": f"TPU:{i}", "coords": list(at), **more} for i, at in enumerate(coords)]


def test_the_torus_is_read_from_the_devices_coordinates_x_first() -> None:
    flat = [(x, y, 0) for y in range(4) for x in range(2)]
    # Not in the order of their numbers: torch_xla sorts by nothing.
    assert torus_of(attributes(*flat)[::-1]) == (2, 4, 1)


@pytest.mark.parametrize(
    "devices",
    [
        attributes((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)),
        attributes((0, 0, 0), (1, 1, 0)),
        [{"name": "TPU:0"}],
        [*attributes((0, 0, 0)), {"name": "TPU:1", "coords": [1, 0, 0], "slice_index": 1}],
    ],
    ids=["y first", "with holes", "without coordinates", "two slices"],
)
def test_what_is_no_filled_slice_numbered_along_x_has_no_torus(
    devices: list[dict[str, object]],
) -> None:
    assert torus_of(devices) is None
