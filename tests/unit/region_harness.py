"""A module in a replica region on the test mesh, and the gradients that leave it."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from spmdzero.backend import Batch, Mesh, RegionRules, current, runtime
from spmdzero.backend.protocols._region import AttentionChoice
from spmdzero.backend.replica._manual import leave_stacked
from spmdzero.plan import ShardingPlan
from spmdzero.state._placed_module import move_module

ROWS = 16  # two for each of the eight devices
X = torch.arange(ROWS * 4.0).reshape(ROWS, 4)


def unplanned(mesh: Mesh) -> ShardingPlan:
    """A plan that splits nothing."""
    return ShardingPlan.build(
        [],
        stage=0,
        mesh=mesh.spec,
        master=False,
        moments=(),
        accumulator_dtype=None,
        accumulation_steps=1,
    )


class Probe:
    """Calls a copy of `module` in a region; `gradients` sums what the sink receives."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        scan: Literal["on", "off"] = "off",
        attention: AttentionChoice = "auto",
        **rules: Any,
    ) -> None:
        self.module, self.mesh = copy.deepcopy(module), mesh
        move_module(
            self.module, mesh=mesh, dtype=dtype, source=lambda names: None, plan=unplanned(mesh)
        )
        self._sums: dict[str, torch.Tensor] = {}
        self.sink_calls: list[str] = []
        self.region = current().region(
            mesh=mesh,
            module=self.module,
            sink=self._sink,
            rules=RegionRules(**rules),
            **({} if attention == "auto" else {"attention": attention}),
            **({} if scan == "off" else {"scan": scan}),
        )

    def _sink(self, name: str, local: torch.Tensor) -> None:
        self.sink_calls.append(name)
        total = leave_stacked(local, self.mesh).sum(0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.region(args, kwargs)

    def batch(self, host: torch.Tensor, dim: int = 0) -> Batch:
        return Batch(self.mesh.place(host, self.mesh.batch_spec(host.dim(), dim)), dim)

    def backward(self, loss: torch.Tensor) -> None:
        # In this thread, as the engine does: a pending tensor that autograd's own thread lets go of
        # too late would make a program of its own.
        with self.region.backward(), torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        runtime.sync()

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: total.cpu() for name, total in self._sums.items()}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.cpu() for name, buffer in self.module.named_buffers()}


class Apply(nn.Module):
    """A module whose forward is `function`, with one parameter so that it can be trained."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def run(function: Callable[..., Any], mesh: Mesh, x: torch.Tensor, **rules: Any) -> Any:
    """`function` of the replicas' rows of `x`; gives its output on the CPU."""
    probe = Probe(Apply(function), mesh, **rules)
    with torch.no_grad():
        output = probe(probe.batch(x))
    return output.cpu()


def exactly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def torch_gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_same_sums(actual: Any, expected: Any, *, floor: float = 0.0) -> None:
    """Equal but for the order of fp32 sums; dicts key by key.

    A sum of m terms in another order differs by at most m * 6e-8 of the terms' magnitude. Here
    m is below 1,000 (16 rows x 12 tokens, widths of 32 and 64) and errors of random sign grow
    with its root: 30 * 6e-8 = 2e-6 for one sum, 1e-5 for a chain of them, relative to the
    tensor's largest value, since a small element may be the difference of large terms. A
    gradient that is zero on paper (a bias before a softmax over it) is noise of the size `floor`:
    6e-8 of the largest gradient that flows through the same model.
    """
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        floor = 6e-8 * max(tensor.abs().max().item() for tensor in expected.values())
        for name in expected:
            assert_same_sums(actual[name], expected[name], floor=floor)
        return
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-5 * scale + floor)
