"""What DeepSpeed wrote at stage 3: its weights, the command line, and engines of any stage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
)
from typer.testing import CliRunner

import spmdzero
from spmdzero.cli import app
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import StoredTensor, open_state
from spmdzero.formats._open import locate
from spmdzero.formats.deepspeed import read
from spmdzero.formats.deepspeed._flat import PartitionedGroup
from tests.interchange.cases import CASES, config_of, model_of
from tests.interchange.record import TAG
from tests.interchange.test_files import assert_same, opened
from tests.interchange.test_read import RECORDED

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

NAME = "z3_w4_bf16_frozen"
RUNNER = CliRunner()


def command(*words: str | Path) -> str:
    done = RUNNER.invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


def put_together(rank_files: list[Path], name: str) -> torch.Tensor:
    """A trained parameter of the recording, by the formula of DeepSpeed's zero_to_fp32."""
    content = torch.load(
        rank_files[0].with_name("zero_pp_rank_0_mp_rank_00_model_states.pt"), weights_only=False
    )
    (shapes,) = [group for group in content["param_shapes"] if name in group]
    index = content["param_shapes"].index(shapes)
    before = list(shapes)[: list(shapes).index(name)]
    ranks = len(rank_files)
    start = sum(-(-shapes[other].numel() // ranks) for other in before)
    count = -(-shapes[name].numel() // ranks)
    flat = [
        torch.load(file, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][index]
        for file in rank_files
    ]
    whole = torch.cat([tensor[start : start + count] for tensor in flat])
    return whole[: shapes[name].numel()].view(shapes[name]).detach()


def test_fp32_weights_are_put_together_from_the_ranks_parts(tmp_path: Path) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(RECORDED / NAME)
    model = model_of(CASES[NAME])[0]
    assert found.keys() == model.state_dict().keys()
    files = [Path(file) for file in get_optim_files(RECORDED / NAME / TAG)]
    assert len(files) == 4
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.float32
        # A frozen parameter is as the model was made, in the dtype of the run.
        whole = put_together(files, name) if parameter.requires_grad else parameter.bfloat16()
        assert torch.equal(found[name], whole.float()), name
    assert torch.equal(found["seen"], torch.arange(3.0))
    lazy = get_fp32_state_dict_from_zero_checkpoint(
        RECORDED / NAME, lazy_mode=True, exclude_frozen_parameters=True
    )
    assert found.keys() - lazy.keys() == {"place", "up.bias"}
    assert all(torch.equal(found[name], tensor.contiguous()) for name, tensor in lazy.items())
    convert_zero_checkpoint_to_fp32_state_dict(RECORDED / NAME, tmp_path)
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    plain = load_state_dict_from_zero_checkpoint(model, RECORDED / NAME)
    assert torch.equal(plain.up.weight.detach(), found["up.weight"])


def test_tied_weights_of_stage_3_are_one_tensor() -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(RECORDED / "z3_w2_fp32_tied")
    assert found["head.weight"] is found["embed.weight"]


def test_the_files_of_stage_3_have_names_of_their_own() -> None:
    file = get_model_state_file(RECORDED / NAME / TAG, 3)
    assert file.endswith(f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt")


@pytest.mark.parametrize("name", ["z3_w2_fp32_tied", NAME])
def test_the_commands_read_and_write_the_files_of_stage_3(tmp_path: Path, name: str) -> None:
    found = json.loads(command("inspect", RECORDED / name, "--json"))
    assert (found["format"], found["updates"]) == ("deepspeed", 4)
    state = opened(name)
    elements = sum(
        t.size // t.dtype.itemsize for k, t in state.tensors.items() if k.startswith("parameter/")
    )
    assert found["elements"] == elements
    for step in (
        ("--to", "native"),
        ("--to", "deepspeed", "--ranks", "3", "--stage", "3"),
        ("--to", "deepspeed", "--ranks", "2"),
        ("--to", "universal"),
    ):
        target = tmp_path / "-".join(step).replace("--", "")
        command("convert", RECORDED / name, target, *step)
        back = tmp_path / "back" / target.name
        command("convert", target, back, "--to", "native")
        assert_same(state, open_state(*locate(back)))
    stage_3 = tmp_path / "to-deepspeed-ranks-3-stage-3" / TAG
    assert len(list(stage_3.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"))) == 3


def test_a_part_of_a_tensor_is_read_from_the_ranks_that_hold_it() -> None:
    group = PartitionedGroup(shapes={"a": (5, 3), "b": (), "c": (7,)}, ranks=4)
    whole = {"a": torch.arange(15.0).view(5, 3), "b": torch.tensor(3.0), "c": torch.arange(7.0)}
    stored = {name: StoredTensor.of(tensor) for name, tensor in whole.items()}
    parts = [group.partition(rank, 4).filled(stored) for rank in range(4)]
    assert [len(part) for part in parts] == [group.numel // 4] * 4
    for name, tensor in whole.items():
        assert torch.equal(group.stored(name, parts).whole(), tensor)
    assert torch.equal(group.stored("a", parts).read(((1, 4), (1, 3))), whole["a"][1:4, 1:3])
    assert torch.equal(group.stored("c", parts).read(((2, 6),)), whole["c"][2:6])


def start(name: str, stage: int) -> Any:
    case = CASES[name]
    model, groups = model_of(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    config = config_of(case, ranks=8, stage=stage) | {"spmd": {"min_shard_elements": 64}}
    return spmdzero.initialize(model=model, model_parameters=groups, config=config)[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_takes_the_weights_of_stage_3_alone(stage: int) -> None:
    engine = start(NAME, stage)
    path, _ = engine.load_checkpoint(RECORDED / NAME, load_module_only=True)
    assert path.endswith("zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert engine.global_steps == 0
    state = opened(NAME)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach().cpu(), state.tensors[f"parameter/{name}"].whole())
    # Masters begin at the loaded weights, as in DeepSpeed.
    master = spmdzero.utils.safe_get_full_fp32_param(engine.module.up.weight)
    assert torch.equal(master.cpu(), state.tensors["parameter/up.weight"].whole().float())


def test_a_damaged_part_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine = start(NAME, 3)
    shutil.copytree(RECORDED / NAME / TAG, tmp_path / TAG)
    file = tmp_path / TAG / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    file.unlink()
    with pytest.raises(
        SpmdZeroCheckpointError, match=r"rank 2 is missing, 4 ranks saved"
    ) as caught:
        engine.load_checkpoint(tmp_path, TAG)
    assert caught.value.file == str(file)
    assert not engine.module.up.weight.detach().cpu().any()


def test_an_engine_at_stage_3_writes_the_files_of_stage_3(tmp_path: Path) -> None:
    engine = start(NAME, 3)
    engine.load_checkpoint(RECORDED / NAME)
    engine.save_deepspeed_checkpoint(tmp_path, universal=False)
    folder = tmp_path / "global_step4"
    for kind in ("zero_pp_rank_*_model_states.pt", "bf16_zero_pp_rank_*_optim_states.pt"):
        assert len(list(folder.glob(kind))) == 8
    assert not (folder / "mp_rank_00_model_states.pt").exists()
    assert_same(opened(NAME), read(folder))
