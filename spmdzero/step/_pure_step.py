"""A step as pure functions of named tensors: its micro-batches, and its end."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend import REPLICATED, Mesh, Passage, arrays
from spmdzero.step._boundary import Boundary
from spmdzero.step._folds import Folds
from spmdzero.step._gradient_path import GradientPath
from spmdzero.step._loss_health import watched
from spmdzero.step._update import master_of_written

Named = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """Every micro-batch of a kind; nothing is written.

    State goes by names: ``"parameter/<name>"``, ``"buffer/<name>"``, ``"accumulator/<name>"``,
    ``"agreement/<label>"``, what `Boundary` takes, ``"total"`` (the mean of the step's losses so
    far), ``"first_bad"`` and ``"finite"`` (see `watched`).

    Attributes:
        mesh: the devices.
        in_region: whether gradients arrive in replica space.
        loss_of: finds the loss in the module's output.
        path: on which gradients go.
        boundary: ends the step; None where the micro-batch doesn't.
        accumulation: micro-batches in the step, whose mean counts.
        scaled: whether there is a loss scale (fp16).
        checks: whether a loss that is not finite keeps the step from applying.
    """

    mesh: Mesh
    in_region: bool
    loss_of: Callable[[Any], torch.Tensor]
    path: GradientPath
    boundary: Boundary | None
    accumulation: int
    scaled: bool
    checks: bool

    def __call__(
        self,
        state: Named,
        numbers: Sequence[torch.Tensor],
        *,
        run: Callable[..., Passage],
        backward: Callable[[Named], contextlib.AbstractContextManager[None]],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and what the micro-batch changes of the state.

        Args:
            state: as it is.
            numbers: what the host uploads: the step, the loss scale, what `Boundary` takes.
            run: the forward; its argument `sink` is that of `Tracing`.
            backward: takes the `state` of what `run` returned; around its backward.
        """
        step, *numbers = numbers
        loss_scale = numbers.pop(0) if self.scaled else None
        loss, gradients, passage = self._differentiate(run, backward, loss_scale)
        new = {"total": state["total"] + loss / self.accumulation}
        loss = self.mesh.mark(loss.reshape(()).clone(), REPLICATED)
        new["first_bad"], finite = watched(
            loss, step, first_bad=state["first_bad"], finite=state["finite"]
        )
        if self.checks:
            new |= {"finite": finite, "loss": loss}
        written = self._written(state, passage.written)
        new, state = {**new, **written}, {**state, **written}
        for name, flag in passage.flags.items():
            known = state.get(f"agreement/{name}")
            new[f"agreement/{name}"] = flag if known is None else known | flag
        waiting = {f"accumulator/{name}": grad for name, grad in gradients.items()}
        for name, grad in waiting.items():
            if name in state:
                waiting[name] = self.path.plus(_after(name), state[name], grad)
        if self.boundary is None:
            return loss, new | waiting
        waiting = {**state, **waiting}
        new |= self.boundary(
            state,
            gradients={
                name: self.path.final(name, waiting.get(f"accumulator/{name}"))
                for name in self.boundary.names
            },
            numbers=numbers,
            finite=finite if self.checks else None,
            call=Folds(),
        )
        accumulators = [name for name in state if name.startswith("accumulator/")]
        return loss, new | {name: self.path.zeros(_after(name)) for name in accumulators}

    def _written(self, state: Named, values: Named) -> Named:
        """What the forward wrote of the state, and the masters that follow it."""
        found: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            parameter, master = f"parameter/{name}", state.get(f"master/{name}")
            found[parameter if parameter in state else f"buffer/{name}"] = value
            if master is not None:
                layout = self.path.plan.at_rest(f"master/{name}")
                found[f"master/{name}"] = master_of_written(self.mesh, value, master, layout)
        return found

    def _differentiate(
        self,
        run: Callable[..., Passage],
        backward: Callable[[Named], contextlib.AbstractContextManager[None]],
        loss_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Named, Passage]:
        """The loss without a gradient, and gradients in the form in which they wait."""
        found: dict[str, torch.Tensor] = {}
        arriving = self.path.of_replica if self.in_region else self.path.of_batch

        def sink(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
            if self.path.is_trained(name):
                grad = grad if waits else arriving(name, grad)
                found[name] = self.path.plus(name, found[name], grad) if name in found else grad

        # It runs in this thread: autograd's own would let go of values after the program was cut.
        with torch.autograd.set_multithreading_enabled(False):
            passage = run(sink=sink)
            loss = self.loss_of(passage.output)
            averaged = loss / self.accumulation
            # The scale is data: a Python number would be another program at each change of it.
            scaled = averaged if loss_scale is None else averaged * loss_scale
            with backward(passage.state):
                arrays.backward(scaled)
        return loss.detach(), found, passage


def _after(name: str) -> str:
    return name.partition("/")[2]
