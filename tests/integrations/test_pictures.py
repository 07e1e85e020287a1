"""Pictures that stand in a batch one after the other, by an engine of a client."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from spmdzero.integrations._initialize import initialize_for_client
from tests.support.engines import config

ROWS, LENGTH, MERGED, IMAGE = 16, 7, 4, 9

# On torch_xla the first forward ends with "replicas disagree": docs/stacks.md says so.
pytestmark = pytest.mark.backends("jax")


class _Vision:
    spatial_merge_size = 2


class _Config:
    vision_config = _Vision()


class Pictures(nn.Module):
    """The form of Qwen-VL: patches of all pictures, grids, positions from a row's kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patch = nn.Embedding(12, 8), nn.Linear(3, 8)
        self.config, self.head = _Config(), nn.Linear(8, 1)

    def get_rope_index(
        self, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **grids: Any
    ) -> tuple[torch.Tensor, None]:
        positions = torch.zeros(3, *input_ids.shape)
        for row, kinds in enumerate(mm_token_type_ids.tolist()):
            positions[:, row] = torch.tensor(kinds).cumsum(0) / 10
        return positions, None

    def forward(
        self, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor,
        pixel_values: torch.Tensor, image_grid_thw: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if position_ids is None:
            position_ids, _ = self.get_rope_index(input_ids, mm_token_type_ids)
        lengths = image_grid_thw.prod(1) // MERGED
        merged = self.patch(pixel_values).unflatten(0, (-1, MERGED)).mean(1)
        seen = torch.cat([part.cumsum(0) for part in merged.split(lengths.tolist())])
        seen = seen / lengths.repeat_interleave(lengths)[:, None]
        mask = input_ids == IMAGE
        if mask.sum() != len(seen):
            raise ValueError("features and tokens do not match")
        x = self.embed(input_ids) + position_ids.mean(0)[..., None]
        return self.head(x.masked_scatter(mask[..., None], seen).tanh()).square().mean()


def batch(sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A picture a row, `sizes` patches high and wide in turn, at a place that rows differ in."""
    draw = torch.Generator().manual_seed(0)
    grids = torch.tensor([(1, *sizes[row % len(sizes)]) for row in range(ROWS)])
    ids = torch.randint(IMAGE, (ROWS, LENGTH), generator=draw)
    for row, count in enumerate((grids.prod(1) // MERGED).tolist()):
        ids[row, row % 3 : row % 3 + count] = IMAGE
    return {
        "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long(), "image_grid_thw": grids,
        "pixel_values": torch.randn(int(grids.prod(1).sum()), 3, generator=draw),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "alike"),
    [([(2, 4)], True), ([(2, 4), (4, 4)], True), ([(2, 4), (4, 4), (2, 2)], False)],
    ids=["one size", "sizes that each device has", "other sizes on each device"],
)
def test_pictures_train_with_their_rows(
    sizes: list[tuple[int, int]], alike: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, inputs = Pictures(), batch(sizes)
    plain = copy.deepcopy(model)
    settings = config(train_micro_batch_size_per_gpu=ROWS, gradient_accumulation_steps=1)
    engine = initialize_for_client(model=model, config=settings)[0]
    loss = engine(**inputs)
    engine.backward(loss)
    expected = plain(**inputs)
    expected.backward()
    # fp32: a mean of means.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert plain.patch.weight.grad is not None
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-4)
    assert engine.shares_rows((), inputs) or not alike
    engine.destroy()


@pytest.mark.parametrize("sizes", [[(2, 4)], [(2, 4), (4, 4), (2, 2)]], ids=["one", "others"])
def test_pictures_are_evaluated_by_a_call_of_the_model(
    sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = Pictures(), batch(sizes)
    expected = copy.deepcopy(model)(**inputs)
    own, devices = Pictures.get_rope_index, list[str]()

    def noted(
        self: Pictures, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **more: Any
    ) -> Any:
        devices.append(input_ids.device.type)
        return own(self, input_ids, mm_token_type_ids, **more)

    monkeypatch.setattr(Pictures, "get_rope_index", noted)
    settings = config(train_micro_batch_size_per_gpu=ROWS, gradient_accumulation_steps=1)
    engine = initialize_for_client(model=model, config=settings)[0]
    # As transformers' Trainer does, outside of the engine.
    engine.eval()
    with torch.no_grad():
        found = engine.module(**inputs)
    # fp32: sums in another order.
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    # Where each token would be a read.
    assert devices == ["cpu"]
    engine.destroy()
