"""DeepSpeed's AutoTP checkpoints on an engine with a tensor axis: in, out, in DeepSpeed again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from tests.interchange.cases import CASES, LIVE, RESUMED_FOR, SAVED_AFTER, config_of, model_of
from tests.interchange.record import order, train
from tests.interchange.test_files import AUTOTP, assert_same, opened
from tests.interchange.test_read import LOSSES, RECORDED, TOLERANCES
from tests.jax_backend import test_tensor_axis
from tests.oracle.model import make_batch
from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]
DEVICES = 8


def started(name: str = AUTOTP, *, stage: int = 2, autotp: bool = True) -> Any:
    """An engine on 8 devices, by default 4 replicas of two."""
    case = (CASES | LIVE)[name]
    model, groups = model_of(case)
    config = config_of(case, ranks=DEVICES, stage=stage, autotp=autotp)
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


@pytest.mark.slow
@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [(AUTOTP, 0, 2), (AUTOTP, 2, 4), ("z1_w2_bf16_tp2", 1, 2), ("z1_w2_bf16_tp2", 3, 4)],
)
def test_deepspeeds_autotp_goes_on_from_ours(
    tmp_path: Path, name: str, stage: int, ranks: int, universal: bool
) -> None:
    engine = started(name, stage=stage)
    trained(engine, 0, SAVED_AFTER)
    engine.save_deepspeed_checkpoint(tmp_path, universal=universal, ranks=ranks // 2)
    mine = trained(engine, SAVED_AFTER, RESUMED_FOR)
    asked = order(
        name,
        start=SAVED_AFTER,
        steps=RESUMED_FOR,
        load=str(tmp_path),
        universal=universal,
        # DeepSpeed's stage 0 keeps its states in no file of a rank.
        stage=max(stage, 1),
    )
    (theirs,) = train([asked], ranks=ranks)
    assert theirs["losses"] == pytest.approx(mine, abs=TOLERANCES[name.split("_")[2]])
    assert (theirs["global_steps"], theirs["lr"]) == (engine.global_steps, engine.get_lr())


@pytest.mark.slow
def test_deepspeed_goes_on_with_a_llama_split_by_transformers_own_plan(tmp_path: Path) -> None:
    engine = test_tensor_axis.started({"fsdp": 4, "tensor": 2}, stage=1)
    for step in range(4):
        engine.train_batch(iter([test_tensor_axis.batch(step)]))
    engine.save_deepspeed_checkpoint(tmp_path, universal=False, ranks=1)
    mine = [engine.train_batch(iter([test_tensor_axis.batch(step)])).item() for step in range(4, 7)]
    asked = ["-m", "tests.jax_backend.autotp_peer", "4", "7", str(tmp_path)]
    ranks = run_ranks(asked, ranks=2, cwd=ROOT, timeout=300)
    assert json.loads(ranks[0].splitlines()[-1])[:-1] == pytest.approx(mine, rel=2e-6)
