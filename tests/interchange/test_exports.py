"""A running engine's state, and checkpoints, as other programs' files."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict
from typer.testing import CliRunner

import spmdzero
from spmdzero.cli import app
from spmdzero.formats import StoredTensor, TrainingState, deepspeed
from tests.interchange.cases import CASES, config_of, model_of
from tests.oracle.model import make_batch

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

CASE = CASES["z2_w4_bf16_frozen"] | {"tied": True}
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def engine() -> Any:
    model, groups = model_of(CASE)
    config = config_of(CASE, ranks=8) | {"spmd": {"min_shard_elements": 64}}
    engine, *_ = spmdzero.initialize(model=model, model_parameters=groups, config=config)
    for step in range(2):
        engine.backward(engine(*make_batch(step, 0)))
        engine.step()
    return engine


@pytest.fixture(scope="module")
def folder(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of the engine."""
    folder = tmp_path_factory.mktemp("native")
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    return folder


@pytest.fixture(scope="module")
def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The fp32 weights, read off the devices one by one."""
    read = spmdzero.utils.safe_get_full_fp32_param
    named = engine.module.named_parameters(remove_duplicate=False)
    found = {n: read(p).cpu() if p.requires_grad else p.detach().cpu().float() for n, p in named}
    return found | {"seen": torch.arange(3.0)}


def assert_equal(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


def convert(source: Path, target: Path, *options: str) -> None:
    done = RUNNER.invoke(app, ["convert", str(source), str(target), *options])
    assert done.exit_code == 0, done.output
    assert str(target) in done.output.replace("\n", "")


def test_save_16bit_model_is_the_module_in_the_dtypes_it_trains_in(
    engine: Any, tmp_path: Path
) -> None:
    assert engine.save_16bit_model(tmp_path / "new", "weights.bin")
    saved = torch.load(tmp_path / "new" / "weights.bin", weights_only=True)
    assert_equal(saved, {n: t.detach().cpu() for n, t in engine.module.state_dict().items()})
    assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()
    engine.save_fp16_model(tmp_path)
    engine.save_16bit_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
    every = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert every.keys() - trained.keys() == {"place", "up.bias"}


def test_what_is_written_for_deepspeed_is_the_engines_state(
    engine: Any, folder: Path, tmp_path: Path
) -> None:
    native = spmdzero.formats.open_state(folder, "global_step2")
    for latest in ("latest_universal", "latest"):
        universal = latest != "latest"
        engine.save_deepspeed_checkpoint(tmp_path, "tag", universal=universal, ranks=3)
        written = deepspeed.read(tmp_path / (tmp_path / latest).read_text())
        assert written.tensors.keys() == native.tensors.keys()
        for name, tensor in native.tensors.items():
            assert torch.equal(written.tensors[name].whole(), tensor.whole()), name
        assert written.host.tied == {"head.weight": "embed.weight"}
        assert written.host.applied == 2


def test_an_engine_goes_on_the_same_from_every_conversion(
    engine: Any, folder: Path, tmp_path: Path
) -> None:
    def go_on(source: Path, tag: str) -> tuple[float, float, list[float]]:
        engine.load_checkpoint(source, tag)
        loss = engine(*make_batch(2, 0))
        engine.backward(loss)
        engine.step()
        return loss.item(), engine(*make_batch(3, 0)).item(), engine.get_lr()

    expected = go_on(folder, "global_step2")
    for to in ("native", "universal", "deepspeed"):
        convert(folder, tmp_path / to, "--to", to, "--ranks", "2")
        tag = "global_step2_universal" if to == "universal" else "global_step2"
        assert go_on(tmp_path / to, tag) == expected
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2


def test_fp32_weights_of_a_checkpoint_are_the_masters(
    folder: Path, masters: dict[str, torch.Tensor]
) -> None:
    assert_equal(get_fp32_state_dict_from_zero_checkpoint(folder), masters)
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert_equal({name: tensor.contiguous() for name, tensor in lazy.items()}, masters)
    loaded = load_state_dict_from_zero_checkpoint(model_of(CASE)[0], folder)
    assert_equal(loaded.state_dict(), masters)


def test_fp32_files_hold_no_more_than_they_may(
    folder: Path, masters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    convert(folder, tmp_path / "sharded", "--to", "fp32", "--max-shard-size", "12KB")
    index = json.loads((tmp_path / "sharded" / "pytorch_model.bin.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    parts = [torch.load(tmp_path / "sharded" / file, weights_only=True) for file in files]
    assert_equal({name: tensor for part in parts for name, tensor in part.items()}, masters)
    convert(folder, tmp_path / "one.bin", "--to", "fp32", "--exclude-frozen")
    one = torch.load(tmp_path / "one.bin", weights_only=True)
    assert masters.keys() - one.keys() == {"place", "up.bias"}


def test_torch_reads_the_safetensors(
    folder: Path, masters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, safe_serialization=True)
    without_tied = {name: t for name, t in masters.items() if name != "head.weight"}
    assert_equal(load_file(tmp_path / "model.safetensors"), without_tied)


def test_transformers_loads_sharded_safetensors(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = GPT2LMHeadModel(config)
    tensors = {f"parameter/{n}": StoredTensor.of(p.detach()) for n, p in model.named_parameters()}
    host = spmdzero.formats.HostState(tied={"lm_head.weight": "transformer.wte.weight"})
    state = TrainingState(tensors=tensors, host=host, source="here")
    weights = spmdzero.formats.Weights.of(state)
    files = spmdzero.formats.export.write_safetensors(weights, tmp_path, max_shard_size="20KB")
    assert len(files) > 2
    config.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_equal(loaded.state_dict(), model.state_dict())


def test_torch_goes_on_from_the_distributed_checkpoint(
    engine: Any, folder: Path, masters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    convert(folder, tmp_path, "--to", "dcp", "--dtype", "fp32")
    model, groups = model_of(CASE)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings():
        # torch warns that one process loads, which is meant.
        warnings.simplefilter("ignore", UserWarning)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(content, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optim"],
    )
    assert_equal(dict(model.state_dict()), masters)
    read = spmdzero.utils.safe_get_full_optimizer_state
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = read(engine.module.get_parameter(name), "exp_avg").cpu()
            assert torch.equal(optimizer.state[parameter]["exp_avg"], own), name
            assert optimizer.state[parameter]["step"] == 2
    assert [group["lr"] for group in optimizer.param_groups] == engine.get_lr()


def test_inspect_says_what_is_in_a_checkpoint(folder: Path) -> None:
    done = RUNNER.invoke(app, ["inspect", str(folder), "--json"])
    found = json.loads(done.output)
    assert found["format"] == "native"
    assert found["counters"]["global_steps"] == 2
    assert found["parameters"] == 8
    assert found["client_state"] == ["epoch"]
    table = RUNNER.invoke(app, ["inspect", str(folder), "--tensors"]).output
    assert "exp_avg/embed.weight" in table


def test_a_wrong_command_line_ends_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    for line, reason in {
        "inspect {empty}": "no folder of checkpoints",
        "inspect {folder} --tag other": "other",
        "convert {folder} {empty} --to zip": "write one of native",
        "convert {folder} {empty} --to deepspeed": "--ranks",
        "convert {folder} {empty} --to fp32 --max-shard-size x": "5GB",
        "convert {folder} {empty} --to dcp --dtype int8": "bf16",
        "convert {folder} {folder} --to deepspeed --ranks 2": "replaced",
    }.items():
        done = RUNNER.invoke(
            app, [text.format(folder=folder, empty=tmp_path) for text in line.split()]
        )
        assert done.exit_code == 2, line
        assert reason in done.output
        assert isinstance(done.exception, SystemExit)
