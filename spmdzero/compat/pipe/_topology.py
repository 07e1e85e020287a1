"""Names and sizes of a pipeline's axes, which scripts pass in the place of a number of stages."""

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any


class ProcessTopology:
    """A grid of ranks with an axis of each name (DeepSpeed, runtime/pipe/topology.py).

    Here it only answers what it was made of: no process has a place in it.

    Args:
        axes: names, the outermost first.
        dims: the length of each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        # The axes are known only here, and DeepSpeed's places have an attribute for each.
        # pyrefly: ignore[bad-class-definition]
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)
        places = itertools.product(*map(range, dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_axis_names(self) -> list[str]:
        """The names, the outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The length of an axis; 0 for one that there isn't."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place, of which every axis is named.

        Raises:
            ValueError: one isn't, or there is no such place.
        """
        if set(coordinates) != set(self.axes):
            raise ValueError(f"get_rank() takes a place on each of the axes {', '.join(self.axes)}")
        place = self.ProcessCoord(**coordinates)
        if place not in self.mapping:
            raise ValueError(f"{place} is outside of axes of {self.dims}")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """The place of a rank, with an attribute for each axis.

        Raises:
            ValueError: there is no such rank.
        """
        for place, known in self.mapping.items():
            if known == rank:
                return place
        raise ValueError(f"rank {rank} not found in topology.")

    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, each of which has its own ranks of data parallelism."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data and model parallelism."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
