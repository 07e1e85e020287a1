"""What DeepSpeed's `zero.Init` writes onto parameters, and clients ask for at stage 3."""

import enum
import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

PARTITION = "_spmdzero_partition"
_ids = itertools.count()


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a parameter; here each parameter is always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class DsAttributes:
    """The `ds_*` attributes of a parameter of a stage 3 engine; others don't have them.

    Source: `Init._convert_to_deepspeed_param` in DeepSpeed's partition_parameters.py.

    Raises:
        AttributeError: the parameter is of no engine or of one below stage 3.
    """

    __slots__ = ()

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has."""
        return _partition(self, "ds_id")[0]

    @property
    def ds_numel(self) -> int:
        """Number of elements of the whole parameter."""
        _partition(self, "ds_numel")
        return _tensor(self).numel()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter, which here is its shape at all times."""
        _partition(self, "ds_shape")
        return _tensor(self).shape

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE: a read gives the whole parameter."""
        _partition(self, "ds_status")
        return ZeroParamStatus.AVAILABLE

    @property
    def partition_numel(self) -> Callable[[], int]:
        """A function that returns the number of elements that one device keeps, with padding."""
        kept = _partition(self, "partition_numel")[1]
        return lambda: kept

    @property
    def ds_tensor(self) -> NoReturn:
        """Always raises, as DeepSpeed's is the part of one rank."""
        _partition(self, "ds_tensor")
        raise AttributeError(
            "a parameter has no ds_tensor: this process drives several devices, each of which has "
            "a part. spmdzero.local_shards(parameter) is what each holds"
        )


def mark_partitioned(parameter: torch.Tensor, kept: tuple[int, ...]) -> None:
    """Gives a parameter of a class with `DsAttributes` their values.

    Args:
        kept: the shape of the part that a device keeps.
    """
    setattr(parameter, PARTITION, (next(_ids), math.prod(kept)))


def _partition(parameter: Any, name: str) -> tuple[int, int]:
    found = vars(parameter).get(PARTITION)
    if found is None:
        raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")
    return found


def _tensor(parameter: Any) -> torch.Tensor:
    return parameter
