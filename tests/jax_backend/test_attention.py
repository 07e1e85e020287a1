"""Programs for TPUs hold attention's kernels: what is lowered for one, without having one."""

from collections.abc import Sequence
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

from spmdzero.backend import runtime
from spmdzero.backend.attention._call import Call, Seen
from spmdzero.backend.jax._attention import KERNELS
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._graph_function import function_of
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.mesh import DeviceMesh
from tests.unit.region_harness import Apply, Probe

ROWS = 8  # one for each device


def lowered_for_tpu(
    mesh: DeviceMesh, attend: Any, *tensors: torch.Tensor, calls: Sequence[None] = (None,)
) -> str:
    """The program of attention and its gradient, of a query that is key and value too."""

    def forward(x: torch.Tensor, *more: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = attend(leaf, *more)
        return out.detach(), *torch.autograd.grad(out, leaf, x)

    with runtime.tracing_only(platform="TPU"), torch.no_grad():
        probe = Probe(Apply(forward), mesh)
        found = probe(*map(probe.batch, tensors))
        assert [call.plain_because for call in probe.region.attention] == [*calls]
        graph, leaves = Graph.of([value_of(tensor) for tensor in found])
        # As `compilations.lower` does, for a platform that isn't here.
        with wide_numbers(), jax.default_matmul_precision("highest"):
            traced = jax.jit(function_of(graph, mesh.devices)).trace(*(v.array for v in leaves))
            return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_are_a_kernel_each_on_a_tpu(
    mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    x = torch.zeros(ROWS, 2, 256, 64, dtype=dtype)
    text = lowered_for_tpu(
        mesh, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), x
    )
    assert text.count("@tpu_custom_call") == 2
    assert "256x256" not in text  # weights


def test_a_window_with_a_cap_and_sinks_is_a_kernel_each_on_a_tpu(mesh: DeviceMesh) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        seen = Seen(causal=True, window=100, keys=None)
        call = Call(query=x, key=x, value=x, seen=seen, soft_cap=50.0, sinks=x[0, :, 0, 0])
        call.require_kernel(short=False)
        return call.run(KERNELS, platform="tpu")

    text = lowered_for_tpu(mesh, attend, torch.zeros(ROWS, 2, 384, 64), calls=[])
    assert text.count("@tpu_custom_call") == 3  # 384 keys are three blocks: two kernels backward
    assert "384x384" not in text  # weights


def test_beside_a_mask_the_backward_has_two_kernels(mesh: DeviceMesh) -> None:
    x, mask = torch.zeros(ROWS, 2, 256, 64), torch.ones(ROWS, 1, 1, 256, dtype=torch.bool)
    text = lowered_for_tpu(
        mesh, lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask), x, mask
    )
    assert text.count("@tpu_custom_call") == 3
    assert "256x256" not in text  # weights
