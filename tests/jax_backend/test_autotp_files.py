"""DeepSpeed's AutoTP checkpoints on an engine with a tensor axis: in, out, and in DeepSpeed again."""

from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from tests.interchange.cases import CASES, RESUMED_FOR, SAVED_AFTER, config_of, model_of
from tests.interchange.test_files import AUTOTP, assert_same, opened
from tests.interchange.test_read import LOSSES, RECORDED, TOLERANCES
from tests.oracle.model import make_batch

ROOT = Path(__file__).parents[2]
DEVICES = 8


def started(*, stage: int = 2, autotp: bool = True, **more: Any) -> Any:
    """An engine on 8 devices, by default 4 replicas of two."""
    case = CASES[AUTOTP]
    model, groups = model_of(case)
    config = config_of(case, ranks=DEVICES, stage=stage, autotp=autotp) | more
    config["spmd"] = {"min_shard_elements": 64}
    return spmdzero.initialize(model=model, model_parameters=groups, config=config)[0]


def trained(engine: Any, first: int, steps: int) -> list[float]:
    return [
        engine.train_batch(iter([make_batch(step, 0)])).item()
        for step in range(first, first + steps)
    ]


@pytest.mark.parametrize(("stage", "autotp"), [(2, True), (3, True), (1, False)])
def test_training_goes_on_as_it_did_in_autotp(stage: int, autotp: bool) -> None:
    engine = started(stage=stage, autotp=autotp)
    path, _ = engine.load_checkpoint(RECORDED / AUTOTP)
    assert path.endswith("mp_rank_00_model_states.pt")
    losses = trained(engine, SAVED_AFTER, RESUMED_FOR)
    assert losses == pytest.approx(LOSSES[AUTOTP]["resumed"], abs=TOLERANCES["fp32"])
    assert (engine.global_steps, engine.get_lr()) == (7, LOSSES[AUTOTP]["lr"])
    shapes = set(arrays.local_shapes(engine.module.head.weight))
    assert shapes == ({(48, 24)} if autotp and stage < 3 else shapes)


@pytest.mark.parametrize("universal", [False, True])
def test_an_engine_with_a_tensor_axis_writes_the_files_of_autotps_ranks(
    tmp_path: Path, universal: bool
) -> None:
    engine = started()
    engine.load_checkpoint(RECORDED / AUTOTP)
    engine.save_deepspeed_checkpoint(tmp_path, universal=universal, ranks=2)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    names = {path.name for path in folder.glob("*.pt")}
    if not universal:
        assert names == {path.name for path in (RECORDED / AUTOTP / "global_step4").iterdir()}
    part = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=False)
    assert (part["mp_world_size"], part["module"]["up.weight"].shape) == (2, (50, 24))
    other = started(stage=1, autotp=False)
    other.load_checkpoint(tmp_path)
    other.save_deepspeed_checkpoint(tmp_path / "whole", universal=False, ranks=1)
    again = spmdzero.formats.open_state(tmp_path / "whole", "global_step4")
    assert_same(opened(AUTOTP), again)
    assert "universal_checkpoint_info" not in torch.load(
        tmp_path / "whole" / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False
    )


def test_ranks_that_cant_share_the_weights_are_refused(tmp_path: Path) -> None:
    engine = started()
    with pytest.raises(SpmdZeroConfigError, match=r"up.weight \[100, 24\] doesn't divide by 3"):
        engine.save_deepspeed_checkpoint(tmp_path, autotp_size=3)
    # 100 columns, but twice 50.
    with pytest.raises(SpmdZeroConfigError, match=r"made of \[50, 50\], which 4 ranks can't"):
        engine.save_deepspeed_checkpoint(tmp_path, autotp_size=4)
    with pytest.raises(SpmdZeroUsageError, match="autotp_size=0"):
        engine.save_deepspeed_checkpoint(tmp_path, autotp_size=0)
    assert list(tmp_path.iterdir()) == []
