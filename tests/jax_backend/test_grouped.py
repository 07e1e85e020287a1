"""Products of groups of rows: the kernels beside torch's own, and what programs for TPUs hold."""

import re
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import transformers

import spmdzero
from spmdzero.backend.jax.kernels._grouped_kernels import Form, Tiles, grouped, tiles_of
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.explain import _aot
from tests.jax_backend.test_attention import lowered_for

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def of_torch(one: torch.Tensor, other: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch._grouped_mm(one, other, offs=torch.tensor(ends, dtype=torch.int32))


def of_kernel(one: torch.Tensor, other: torch.Tensor, ends: list[int], **how: Any) -> torch.Tensor:
    """By the kernel, interpreted: rows and matrices, or where rows are summed two of rows."""
    dtype = str(one.dtype).removeprefix("torch.")
    form = Form(
        rows=one.shape[0], inner=one.shape[1], groups=len(ends), dtype=dtype, interpret=True,
        outer=other.shape[1 if how else 2], **how,
    )  # fmt: skip
    arrays = (jnp.asarray(t.float().numpy(), dtype=dtype) for t in (one, other))
    (made,) = grouped(form)(*arrays, jnp.asarray(ends, dtype=jnp.int32))
    return torch.tensor(made.astype("float32").tolist()).to(one.dtype)


# Tiles have 128 rows: ends within one, at its edge, groups without rows, one of several tiles.
@pytest.mark.parametrize(
    ("ends", "dtype"),
    [
        pytest.param(ends, dtype, marks=[pytest.mark.slow] * (dtype != quick))
        for ends, quick in (
            ([100, 100, 130, 300], torch.float32),
            ([0, 128, 256, 256], torch.bfloat16),
            ([5, 290, 299, 300], torch.bfloat16),
        )
        for dtype in DTYPES
    ],
    ids=str,
)
def test_kernels_compute_what_torch_does(ends: list[int], dtype: torch.dtype) -> None:
    seeded = torch.Generator().manual_seed(0)
    shapes = (300, 128), (len(ends), 128, 256), (300, 256)
    rows, matrices, grads = (torch.randn(s, generator=seeded).to(dtype) for s in shapes)
    seen, close = ends[-1], {"rtol": DTYPES[dtype], "atol": 30 * DTYPES[dtype]}
    made = of_kernel(rows, matrices, ends)
    # Torch leaves rows after the last group as they are.
    torch.testing.assert_close(made[:seen], of_torch(rows[:seen], matrices, ends), **close)
    assert not made[seen:].any()
    turned = of_kernel(rows, matrices.mT.contiguous(), ends, transposed=True)
    torch.testing.assert_close(turned, made, **close)
    sums = of_kernel(rows, grads, ends, summed=True)
    torch.testing.assert_close(sums, of_torch(rows[:seen].T, grads[:seen], ends), **close)


def test_numbers_of_another_group_are_not_read_even_if_they_are_infinite() -> None:
    rows, others = torch.ones(256, 128), torch.ones(256, 128)
    rows[100:], others[100:] = float("inf"), float("nan")
    sums = of_kernel(rows, others, [100, 256], summed=True)
    assert torch.equal(sums[0], torch.full((128, 128), 100.0))
    assert not sums[1].isfinite().any()


def test_tiles_fit_the_memory_and_whole_matrices_are_read_once() -> None:
    # Qwen3-MoE's and Mixtral's.
    for rows, inner, outer, groups in ((65536, 2048, 768, 128), (16384, 14336, 4096, 8)):
        form = Form(rows=rows, inner=inner, outer=outer, groups=groups, dtype="bfloat16")
        tiles = tiles_of(form)
        assert tiles is not None
        assert tiles.memory(form) < 2**24
        assert (inner % tiles.inner, outer % tiles.outer) == (0, 0)
    # 128 rows in place of 512, of which a group has a mean of 512: less is computed twice.
    assert tiles_of(Form(rows=65536, inner=2048, outer=768, groups=128, dtype="bfloat16")) == Tiles(
        rows=128, inner=2048, outer=768
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_experts_and_their_gradients_are_kernels_on_a_tpu(
    mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    def experts(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # As transformers holds weights, [experts, outer, inner]; here they are the rows themselves.
        return torch._grouped_mm(x[0], x[0].unflatten(0, (2, 128)).mT, offs=ends[0])[None]

    x, ends = torch.zeros(8, 256, 128, dtype=dtype), torch.tensor([[10, 256]] * 8).int()
    text = lowered_for("tpu", mesh, experts, x, ends, calls=())
    # The gradients of rows and of weights are one each.
    assert text.count("@tpu_custom_call") == 3
    assert "ragged_dot" not in text


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4"])
def test_no_expert_sees_all_rows_in_what_the_tpus_compiler_makes(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    read = _aot._read

    def kept(*args: Any, **more: Any) -> Any:
        made = read(*args, **more)
        texts.append(made.hlo or "")
        return made

    monkeypatch.setattr(_aot, "_read", kept)
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    ids = torch.zeros(8, 256, dtype=torch.int64)
    spmdzero.explain(
        model,
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        },
        {"input_ids": ids, "labels": ids},
        tpu=[target],
        stages=(2,),
    )
    called = r"%(?:aten__grouped_mm|grouped_\w+?)[.\d]* = bf16\[([\d,]+)\]\S* custom-call"
    made = [len(shape.split(",")) for shape in re.findall(called, texts[-1])]
    # Two products, each with a gradient of its rows, `[rows, width]`, and one of its weights.
    assert sorted(made) == [2] * 4 + [3] * 2
    assert "ragged" not in texts[-1]
