"""Groups of chips over which the TPU's compiler makes reduce-scatters."""

import math

Torus = tuple[int, ...]
"""Number of chips in each direction of one slice, x first; devices are numbered along x first."""


def scatters_whole(torus: Torus) -> bool:
    """Whether libtpu was seen to scatter over all of a slice at once.

    Measured with libtpu 0.0.21: yes on 2x2, 2x4, 4x8, 8x16; no on 4x4, 8x8, 16x16 and on 3-D
    slices, where libtpu prefers an all-reduce over all directions.
    """
    sides = [length for length in torus if length > 1]
    return len(sides) < 2 or (len(sides) == 2 and (sides[0] != sides[1] or sides == [2, 2]))


def scatter_steps(torus: Torus) -> tuple[int, ...]:
    """Sizes of the groups that reduce-scatter one after the other, slowest-numbered first.

    Together they move as much as one reduce-scatter over all: of N = A * B devices the first sends
    (A-1)/A of a gradient, the second (B-1)/B of the A-th part that is left, together (N-1)/N.
    The product of the sizes is the number of chips.
    """
    if scatters_whole(torus):
        return (math.prod(torus),)
    return tuple(length for length in reversed(torus) if length > 1)
