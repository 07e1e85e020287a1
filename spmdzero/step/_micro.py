"""A micro-batch as a pure function: forward, backward, and gradients as they wait for the step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdzero.backend.torch_xla import GlobalForward, Passage, ReplicaRegion
from spmdzero.step._gradient_path import GradientPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a micro-batch comes to; nothing is written yet.

    Attributes:
        loss: not divided by the accumulation steps, without a gradient.
        gradients: by name, in the form in which they wait for the step.
        buffers, flags: see `Passage`.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    flags: Mapping[str, torch.Tensor]


def micro(
    run: Callable[..., Passage],
    *,
    forward: ReplicaRegion | GlobalForward,
    loss_of: Callable[[Any], torch.Tensor],
    path: GradientPath,
    accumulation: int,
    loss_scale: torch.Tensor | None,
    key: Callable[[int], torch.Tensor],
) -> MicroBatch:
    """Forward and backward of one micro-batch.

    Args:
        run: the forward; its argument `sink` is that of `Tracing`.
        forward: which `run` calls.
        loss_of: finds the loss in the module's output.
        path: on which the gradients go.
        accumulation: micro-batches in the step, whose mean counts.
        loss_scale: fp16's, 0-dim.
        key: of random draws in backward, see `Tracing`.
    """
    found: dict[str, torch.Tensor] = {}
    arriving = path.of_replica if isinstance(forward, ReplicaRegion) else path.of_batch

    def sink(name: str, grad: torch.Tensor) -> None:
        if path.is_trained(name):
            grad = arriving(name, grad)
            found[name] = path.plus(name, found[name], grad) if name in found else grad

    passage = run(sink=sink)
    loss = loss_of(passage.output)
    differentiated = scaled(loss / accumulation, loss_scale)
    # In this thread: autograd's own would let go of values only after the program was cut.
    with torch.autograd.set_multithreading_enabled(False), forward.backward(passage.state, key=key):
        differentiated.backward()
    return MicroBatch(
        loss=loss.detach(), gradients=found, buffers=passage.buffers, flags=passage.flags
    )


def scaled(loss: torch.Tensor, loss_scale: torch.Tensor | None) -> torch.Tensor:
    """`loss` times the loss scale: as data, because a Python number would be a program."""
    return loss if loss_scale is None else loss * loss_scale
