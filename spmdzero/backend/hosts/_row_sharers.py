"""The group of the devices that share rows, which DeepSpeed-Ulysses has one process each for.

One process drives them all, so that each member has what the process has: whole rows, and numbers
that are computed of whole rows.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist

# torch_xla replaces the function of `torch.distributed` by one without the last argument.
from torch.distributed.distributed_c10d import new_group

from spmdzero._names import dotted
from spmdzero.backend._ended_work import ended_work
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError

_NAME = "spmdzero_rows"
_SAME = ("AVG", "MAX", "MIN")
_ALL = (*_SAME, "SUM", "PRODUCT", "BAND", "BOR", "BXOR")


class RowSharers(dist.ProcessGroup):
    """A group of devices whose members all have what this process hands over.

    A gather of one number, of any dtype, gives as many equal ones as there are members, with
    gradients, so that a script's weighted mean over the members is the number itself. Minimum,
    maximum, mean and broadcast leave a tensor as it is. What would count a value several times, or
    put parts of a row together, is refused.

    Args:
        members: number of devices that share each row.
    """

    def __init__(self, members: int) -> None:
        # torch's stub knows one of the two constructors.
        super().__init__(0, members)  # pyrefly: ignore[missing-argument, bad-argument-type]
        self._own_name = _NAME

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which torch knows the group."""
        return _NAME

    @property
    def group_name(self) -> str:
        """The name under which torch has it in its registry."""
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        # torch's class has no room for a name where no backend of torch's is registered.
        self._own_name = name

    # pyrefly: ignore[bad-override]
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Sets each output to the input.

        Raises:
            SpmdZeroUsageError: the input has more than one element.
        """
        if inputs[0].numel() != 1:
            _refuse(
                f"all_gather of a tensor {list(inputs[0].shape)}",
                "it has whole rows already, and what was gathered would have each of them "
                f"{self.size()} times",
                "Use the tensor as it is",
            )
        for output in outputs[0]:
            output.copy_(inputs[0])
        return ended_work(outputs)

    # pyrefly: ignore[bad-override]
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Sets each output to its input: torch's backward of a gather, of which one is needed."""
        for output, value in zip(outputs, inputs, strict=True):
            _require_number("all_to_all", value)
            output.copy_(value)
        return ended_work(outputs)

    # pyrefly: ignore[bad-override]
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Leaves the tensors as they are.

        Raises:
            SpmdZeroUsageError: the reduction is another one than a mean, a minimum or a maximum.
        """
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        operation = next((n for n in _ALL if asked == getattr(dist.ReduceOp, n)), "another one")
        if operation not in _SAME:
            _refuse(
                f"all_reduce with {operation}",
                f"each of its {self.size()} members has the number of whole rows, which would "
                "count as often",
                "Leave it out, or take the mean: op=ReduceOp.AVG",
            )
        return ended_work(tensors)

    # pyrefly: ignore[bad-override]
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Leaves the tensors as they are."""
        return ended_work(tensors)

    # pyrefly: ignore[bad-override]
    def barrier(self, opts: Any = None) -> Any:
        """Waits for nobody."""
        return ended_work([])

    def __deepcopy__(self, memo: Any) -> "RowSharers":
        return self

    def __reduce__(self) -> Any:
        return share_rows, (self.size(),)


def _unsupported(name: str) -> Any:
    def refused(self: RowSharers, *_: Any, **__: Any) -> NoReturn:
        _refuse(name, "there is one process, and each member has whole rows", "Leave it out")

    return refused


_UNSUPPORTED = """
    _allgather_base allgather_coalesced allgather_into_tensor_coalesced allreduce_coalesced reduce
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base gather scatter
    send recv recv_anysource monitored_barrier all_gather_single all_gather_single_coalesced
    reduce_scatter_single reduce_scatter_single_coalesced all_to_all_single gather_single
    gather_into_tensor
"""
for _method in dotted(_UNSUPPORTED):
    setattr(RowSharers, _method, _unsupported(_method.strip("_")))


class _Held:
    """Holds what is known of the devices that share rows: their group, once there is one."""

    group: RowSharers | None = None
    members = 1


def share_rows(members: int) -> RowSharers:
    """The group of `members` devices; the same one at each call.

    Raises:
        SpmdZeroUsageError: there is one of another size.
    """
    known = row_sharers()
    if known is not None and known.size() != members:
        raise SpmdZeroUsageError(
            f"initialize_sequence_parallel({members}): {known.size()} devices share rows in this "
            "process already, and it has one group of them. Use that size"
        )
    if known is None:
        processes.join()
        if not hasattr(dist.Backend, _NAME.upper()):
            dist.Backend.register_backend(
                _NAME, lambda *_: RowSharers(_Held.members), devices=["cpu"]
            )
        _Held.members = members
        # Only this process is in it: the devices that share rows are those of one host.
        made: Any = new_group([dist.get_rank()], backend=_NAME, use_local_synchronization=True)
        known = _Held.group = made
    return known


def row_sharers() -> RowSharers | None:
    """The group that `share_rows` made; None if it has made none."""
    return _Held.group


def forget_row_sharers() -> None:
    """Lets go of the group, so that another size can be asked for."""
    if _Held.group is not None and dist.is_initialized():
        dist.destroy_process_group(_Held.group)
    _Held.group = None


def _require_number(what: str, tensor: torch.Tensor) -> None:
    if tensor.numel() != 1:
        _refuse(f"{what} of a tensor {list(tensor.shape)}", "it has whole rows", "Leave it out")


def _refuse(what: str, reason: str, instead: str) -> NoReturn:
    raise SpmdZeroUsageError(
        f"{what} over the devices that share rows: one process drives them, so {reason}. {instead}"
    )
