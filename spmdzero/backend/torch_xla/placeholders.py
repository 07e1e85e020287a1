"""Tracing without data, for programs of tensors that no memory here could hold."""

from collections.abc import Iterable, Sequence

import torch

from spmdzero.backend.protocols._programs import AnnotatedProgram
from spmdzero.backend.torch_xla import _private


class Placeholders:
    """Tensors without data, from which programs can be traced, but not run."""

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []
        self._shardings: list[str] = []
        # A placeholder has no sharding: this keeps that of a tensor which was not written since.
        self._latest: dict[torch.Tensor, tuple[tuple[int, int], str]] = {}

    def stand_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes each tensor an input of later traces, sharded as its value was.

        Its pending operations are dropped.
        """
        for tensor in tensors:
            stamp, sharding = self._latest.get(tensor, (None, ""))
            if stamp != _private.write_stamp(tensor):
                sharding = _private.sharding_of(tensor) or "{replicated}"
            empty = _private.placeholder(tensor.shape, tensor.dtype)
            # `tensor` will hold the results computed for it; the clone stays the input.
            self._inputs.append(empty.clone())
            self._shardings.append(sharding)
            tensor.data = empty
            self._latest[tensor] = _private.write_stamp(tensor), sharding

    def program(self, outputs: Sequence[torch.Tensor]) -> AnnotatedProgram:
        """The pending program that computes `outputs`."""
        proto, numbers = _private.annotated_program(outputs, inputs=self._inputs)
        shardings = zip(numbers, self._shardings, strict=True)
        return AnnotatedProgram(
            module=proto,
            input_shardings={number: sharding for number, sharding in shardings if number >= 0},
        )
