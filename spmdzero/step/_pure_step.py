"""A step as pure functions of named tensors."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend import Mesh, Passage, arrays, first_flag
from spmdzero.step._boundary import Boundary
from spmdzero.step._folds import Folds
from spmdzero.step._gradient_path import GradientPath
from spmdzero.step._loss_health import watched
from spmdzero.step._update import master_of_written

Named = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """The program of every micro-batch of a kind, as a function that writes nothing.

    The state has names: ``"parameter/<name>"``, ``"buffer/<name>"``, ``"accumulator/<name>"``,
    ``"agreement/<label>"``, the names for `Boundary`, ``"total"`` (the mean of the step's losses so
    far), ``"first_bad"`` and ``"finite"`` (see `watched`).

    Attributes:
        mesh: the devices.
        in_region: whether gradients arrive in replica space.
        loss_of: finds the loss in the module's output.
        path: the path of gradients to the boundary.
        boundary: ends the step; None if the micro-batch doesn't end it.
        accumulation: number of micro-batches in the step, over which gradients are averaged.
        scaled: whether there is a loss scale (fp16).
        checks: whether a non-finite loss keeps the step from applying.
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
        """The loss, and the tensors of the state that the micro-batch changes.

        Args:
            state: the present state.
            numbers: the host's uploads: the step, the loss scale, the numbers for `Boundary`.
            run: runs the forward; its argument `sink` is that of `Tracing`.
            backward: takes the `state` of the passage that `run` returned; surrounds its backward.
        """
        step, *numbers = numbers
        loss_scale = numbers.pop(0) if self.scaled else None
        loss, gradients, passage = self._differentiate(run, backward, loss_scale)
        new = {"total": state["total"] + loss / self.accumulation}
        loss = self.mesh.whole(loss.reshape(()).clone())
        new["first_bad"], finite = watched(
            loss, step, first_bad=state["first_bad"], finite=state["finite"]
        )
        if self.checks:
            new |= {"finite": finite, "loss": loss}
        written = self._written(state, passage.written)
        for name, flag in passage.flags.items():
            known = state.get(f"agreement/{name}")
            new[f"agreement/{name}"] = flag if known is None else first_flag(known, flag)
        ended = self.ending({**state, **written}, gradients, numbers, finite=finite)
        return loss, {**new, **written, **ended}

    def ending(
        self,
        state: Named,
        gradients: Named,
        numbers: Sequence[torch.Tensor],
        *,
        finite: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The tensors of the state that a micro-batch changes after its backward.

        Args:
            state: the state, with what the forward wrote.
            gradients: those of the micro-batch, in their waiting form.
            numbers: the host's uploads for `Boundary`.
            finite: whether all losses of the step were finite, 0-dim.
        """
        waiting = {f"accumulator/{name}": grad for name, grad in gradients.items()}
        for name, grad in waiting.items():
            if name in state:
                waiting[name] = self.path.plus(_after(name), state[name], grad)
        if self.boundary is None:
            return waiting
        waiting = {**state, **waiting}
        new = self.boundary(
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
        return new | {name: self.path.zeros(_after(name)) for name in accumulators}

    def _written(self, state: Named, values: Named) -> Named:
        """The state that the forward wrote, and the masters of written parameters."""
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
        """The loss without a gradient, the gradients in their waiting form, and the passage."""
        found: dict[str, torch.Tensor] = {}
        arriving = self.path.of_replica if self.in_region else self.path.of_batch

        def sink(name: str, grad: torch.Tensor, *, waits: bool = False) -> None:
            if self.path.is_trained(name):
                self.path.add(found, name, grad if waits else arriving(name, grad))

        # The backward runs in this thread: autograd's threads would free values after the program
        # was cut.
        with torch.autograd.set_multithreading_enabled(False):
            passage = run(sink=sink)
            loss = self.loss_of(passage.output)
            averaged = loss / self.accumulation
            # The scale is data: a Python number would need a new program after each change.
            scaled = averaged if loss_scale is None else averaged * loss_scale
            with backward(passage.state):
                arrays.backward(scaled)
        return loss.detach(), found, passage


def _after(name: str) -> str:
    return name.partition("/")[2]
