"""States that rest in bf16: saved as they are, and loaded with one rounding or none."""

from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from tests.checkpoint.runs import assert_state, config, make_model, start, train, whole_state

BOTH: dict[str, dict[str, str]] = {"fp32": {}, "bf16": {"exp_avg": "bfloat16"}}


def started(dtype: str) -> spmdzero.Engine:
    settings = config(2)
    settings["spmd"] = settings["spmd"] | {"moments": BOTH[dtype]}
    return start(settings)


def save(engine: spmdzero.Engine, folder: Path) -> dict[str, Any]:
    """How to load each form of the engine's state into another engine."""
    engine.save_checkpoint(folder / "native")
    engine.save_deepspeed_checkpoint(folder / "universal")
    engine.save_deepspeed_checkpoint(folder / "ranks", universal=False)
    whole = engine.module.state_dict(), engine.optimizer.state_dict()

    def load_whole(other: spmdzero.Engine) -> None:
        other.module.load_state_dict(whole[0])
        other.optimizer.load_state_dict(whole[1])

    folders = [folder / name for name in ("native", "universal", "ranks")]
    loads = {f.name: lambda other, f=f: other.load_checkpoint(f) for f in folders}
    return loads | {"state_dict": load_whole}


def expected(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {n: t.to(dtype) if n.startswith("exp_avg/") else t for n, t in state.items()}


@pytest.mark.parametrize(("here", "there"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_a_state_is_rounded_once_where_it_has_to_be(here: str, there: str, tmp_path: Path) -> None:
    engine = started(here)
    train(engine, range(2))
    state = whole_state(engine)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert {t.dtype for n, t in state.items() if n.startswith("exp_avg/")} == {dtypes[here]}
    assert {t.dtype for n, t in state.items() if n.startswith("exp_avg_sq/")} == {torch.float32}
    rounded = expected(state, dtypes[there])
    for form, load in save(engine, tmp_path).items():
        other = started(there)
        load(other)
        found = whole_state(other)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in rounded.items()}
        assert_state(other, rounded)
        # The step's program still has the dtype that it was made for.
        train(other, range(2, 3))
        assert {n: t.dtype for n, t in whole_state(other).items()} == {
            n: t.dtype for n, t in rounded.items()
        }, form


def test_torchs_adamw_goes_on_from_a_state_in_bf16_and_gives_it_back() -> None:
    engine = started("bf16")
    train(engine, range(2))
    model = make_model()
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(engine.optimizer.state_dict())
    assert plain.state[model.odd.weight]["exp_avg"].dtype == torch.float32
    fresh = started("bf16")
    fresh.module.load_state_dict(engine.module.state_dict())
    fresh.optimizer.load_state_dict(plain.state_dict())
    assert_state(fresh, whole_state(engine))
