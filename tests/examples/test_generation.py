"""How the demo writes text: one program for all tokens, each row as if it were alone."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import spmdzero
from spmdzero.backend import Mesh, counters

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

EXAMPLES = Path(__file__).parents[2] / "examples"
WINDOW = 16


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_gpt

    # Cold enough to take the likeliest token each time.
    monkeypatch.setattr(train_gpt, "TEMPERATURE", 1e-4)
    return train_gpt


def small_model(demo: ModuleType) -> torch.nn.Module:
    torch.manual_seed(0)
    size = demo.GPTConfig(layers=2, heads=2, width=16, window=WINDOW, vocabulary=32)
    model = demo.GPT(size)
    for parameter in model.parameters():
        # The demo starts at zeros, with which all tokens are equally likely.
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompts(count: int) -> list[list[int]]:
    return [list(range(1, 2 + row % 3)) for row in range(count)]


def test_the_demo_compiles_nothing_after_its_second_token(demo: ModuleType, mesh: Mesh) -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = spmdzero.initialize(model=small_model(demo), config=config)
    columns = demo.generate(engine, prompts(mesh.size), window=WINDOW, count=8)
    # torch_xla computes what is read: whether the first call's indices were in range, which nobody
    # has read, is started by the second call, as a program of its own.
    first = [next(columns), next(columns)]
    compiled, _ = counters.compiled()
    written = torch.stack([*first, *columns], dim=1)
    assert written.shape == (mesh.size, 8)
    assert counters.compiled()[0] == compiled

    # Rows of different lengths, beside each other, get what the module gives to each alone.
    model = small_model(demo)
    for prompt, row in zip(prompts(mesh.size), written.tolist(), strict=True):
        alone = list(prompt)
        for _ in row:
            alone.append(
                int(model(torch.tensor([alone]), at=torch.tensor([len(alone) - 1])).argmax())
            )
        assert prompt + row == alone

    # The longest prompt has 3 tokens, and the window that was compiled for has 16.
    assert len(list(demo.generate(engine, prompts(mesh.size), window=WINDOW, count=99))) == 13
