"""Programs for TPUs and GPUs hold attention's kernels: what is lowered for one that isn't here."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import jax
import pytest
import torch
import torch.nn.functional as F

from spmdzero.backend import tracing_only
from spmdzero.backend.attention._call import Call, Seen
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._graph_function import function_of
from spmdzero.backend.jax.kernels._attention import KERNELS
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.mesh import DeviceMesh
from tests.unit.region_harness import Apply, Probe

ROWS = 8  # one for each device


def lowered_for(
    platform: str,
    mesh: DeviceMesh,
    attend: Any,
    *tensors: torch.Tensor,
    calls: Sequence[str | None] = (None,),
) -> str:
    """The program of attention and its gradient, of a query that is key and value too."""

    def forward(x: torch.Tensor, *more: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            out = attend(leaf, *more)
        return out.detach(), *torch.autograd.grad(out, leaf, x)

    with tracing_only(platform=platform.upper()), torch.no_grad():
        probe = Probe(Apply(forward), mesh)
        found = probe(*map(probe.batch, tensors))
        assert [call.plain_because for call in probe.region.attention] == [*calls]
        graph, leaves = Graph.of([value_of(tensor) for tensor in found])
        # As `compilations.lower` does, for a platform that isn't here.
        with wide_numbers(), jax.default_matmul_precision("highest"):
            traced = jax.jit(function_of(graph, mesh.devices)).trace(*(v.array for v in leaves))
            return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_are_a_kernel_each_on_a_tpu(
    mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    x = torch.zeros(ROWS, 2, 256, 64, dtype=dtype)
    text = lowered_for(
        "tpu", mesh, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), x
    )
    assert text.count("@tpu_custom_call") == 2
    assert "256x256" not in text  # weights


def test_a_window_with_a_cap_and_sinks_is_a_kernel_each_on_a_tpu(mesh: DeviceMesh) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        seen = Seen(causal=True, window=100, keys=None)
        call = Call(query=x, key=x, value=x, seen=seen, soft_cap=50.0, sinks=x[0, :, 0, 0])
        call.require_kernel(short=False)
        return call.run(KERNELS, platform="tpu")

    text = lowered_for("tpu", mesh, attend, torch.zeros(ROWS, 2, 384, 64), calls=[])
    assert text.count("@tpu_custom_call") == 3  # 384 keys are three blocks: two kernels backward
    assert "384x384" not in text  # weights


def test_beside_a_mask_the_backward_has_two_kernels(mesh: DeviceMesh) -> None:
    x, mask = torch.zeros(ROWS, 2, 256, 64), torch.ones(ROWS, 1, 1, 256, dtype=torch.bool)
    text = lowered_for(
        "tpu",
        mesh,
        lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        x,
        mask,
    )
    assert text.count("@tpu_custom_call") == 3
    assert "256x256" not in text  # weights


@pytest.mark.parametrize("window", [None, 100])
def test_forward_and_backward_are_a_call_of_cudnn_each_on_a_gpu(
    mesh: DeviceMesh, window: int | None
) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        keys = x[:, :1]
        if window is None:
            return F.scaled_dot_product_attention(x, keys, keys, is_causal=True, enable_gqa=True)
        seen = Seen(causal=True, window=window, keys=None)
        call = Call(query=x, key=keys, value=keys, enable_gqa=True, seen=seen)
        call.require_kernel(short=False, platform="cuda")
        return call.run(KERNELS, platform="cuda")

    x = torch.zeros(ROWS, 4, 250, 64, dtype=torch.bfloat16)
    text = lowered_for("cuda", mesh, attend, x, calls=[] if window else [None])
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert text.count(f"\\22sliding_window_length\\22: {window or 0}") == 2
    assert text.count("CAUSAL") == 2
    assert "250x250" not in text  # weights


OFF_CUDNN: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "take bfloat16 or float16, not float32": (torch.float32, {}),
    "causal masks and windows alone": (torch.bfloat16, {"attn_mask": torch.ones(64, 64).bool()}),
}


@pytest.mark.parametrize("reason", OFF_CUDNN)
def test_what_cudnn_is_not_asked_for_is_plain_on_a_gpu(mesh: DeviceMesh, reason: str) -> None:
    dtype, more = OFF_CUDNN[reason]

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, **more)

    x = torch.zeros(ROWS, 2, 64, 64, dtype=dtype)
    assert "cudnn" not in lowered_for("cuda", mesh, attend, x, calls=[ANY])
