"""DeepSpeed's files, read and written without an engine."""

import collections
import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmdzero.config import load_config
from spmdzero.engine._tensor_axis import autotp_parts
from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats import TrainingState, open_state
from spmdzero.formats.deepspeed import (
    ALONE,
    Target,
    TensorParallel,
    read,
    write_regular,
    write_universal,
)
from spmdzero.formats.deepspeed._pickles import read_pt
from spmdzero.formats.deepspeed._splits import Split, SplitError, read_split
from tests.interchange.cases import CASES, config_of, model_of
from tests.interchange.record import TAG
from tests.interchange.test_read import RECORDED, UNIVERSALS

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

AUTOTP = "z2_w4_fp32_tp2"


def tag_of(name: str) -> str:
    return f"{TAG}_universal" if name in UNIVERSALS else TAG


def opened(name: str) -> TrainingState:
    model, groups = model_of(CASES[name.removesuffix("_universal")])
    names = {parameter: key for key, parameter in model.named_parameters()}
    order = [[names[p] for p in group["params"]] for group in groups]
    return read(RECORDED / name / tag_of(name), order)


def assert_same(one: TrainingState, other: TrainingState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        assert torch.equal(tensor.whole(), other.tensors[name].whole()), name
    assert one.host.counters == other.host.counters
    assert (one.host.applied or 0) == (other.host.applied or 0)
    assert one.host.scheduler == other.host.scheduler
    assert one.host.tied == other.host.tied


@pytest.mark.parametrize("name", UNIVERSALS)
def test_both_formats_of_one_checkpoint_are_the_same_state(name: str) -> None:
    # DeepSpeed's own converter made the universal one.
    assert_same(opened(name.removesuffix("_universal")), opened(name))


@pytest.mark.parametrize(
    ("name", "trained"), [("z1_w2_bf16_gacc32", 9), ("z3_w4_bf16_frozen", 7), ("z3_w2_fp16", 9)]
)
def test_masters_are_the_weights_before_rounding(name: str, trained: int) -> None:
    state = opened(name)
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    masters = {k.partition("/")[2]: t for k, t in state.tensors.items() if k.startswith("master/")}
    assert len(masters) == trained
    for name, master in masters.items():
        assert torch.equal(master.whole().to(dtype), state.tensors[f"parameter/{name}"].whole())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_for_ranks_is_read_back_bit_for_bit(
    tmp_path: Path, name: str, stage: int
) -> None:
    state = opened(name)
    config = {"zero_optimization": {"sub_group_size": 900}}
    for ranks in (1, 3):
        target = Target(state=state, ranks=ranks, stage=stage, config=config)
        write_regular(target, tmp_path / "tag")
        back = read(tmp_path / "tag")
        assert_same(state, back)
        for mine, saved in zip(back.host.param_groups, state.host.param_groups, strict=True):
            # FusedAdam's key is added, which torch's Adam has not.
            assert mine == {"bias_correction": True} | saved or mine == saved


def test_what_is_written_as_universal_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    for name in ("z1_w2_fp32_tied", "z2_w2_fp16", "z2_w4_bf16_frozen", "z3_w4_bf16_frozen"):
        state = opened(name)
        write_universal(Target(state=state, ranks=1, stage=1), tmp_path / "tag")
        assert_same(state, read(tmp_path / "tag"))


@pytest.mark.parametrize(
    "name", ["z2_w4_bf16_frozen", AUTOTP, *(n for n in CASES if n[:2] == "z3")]
)
def test_written_rank_files_are_those_that_deepspeed_wrote(tmp_path: Path, name: str) -> None:
    config, ranks = CASES[name]["config"], CASES[name]["ranks"]
    stage, shared = config["zero_optimization"]["stage"], ALONE
    if name == AUTOTP:
        ranks, shared = ranks // CASES[name]["tp"], of_autotp()
    target = Target(
        state=opened(name), ranks=ranks, stage=stage, config=config, tensor_parallel=shared
    )
    write_regular(target, tmp_path / TAG)
    theirs = RECORDED / name / TAG
    assert {p.name for p in theirs.iterdir()} == {p.name for p in (tmp_path / TAG).iterdir()}
    for file in sorted(theirs.iterdir()):
        # Settings that DeepSpeed takes from its config when a file doesn't have them.
        left_out = {"clip_grad", "ds_config", "affine_map"}
        if "_rank_0_" not in file.name and "mp_rank_00_model" not in file.name:
            # The first rank alone of DeepSpeed's looks which parameters are tied.
            left_out.add("shared_params")
        assert_same_content(read_pt(tmp_path / TAG / file.name), read_pt(file), left_out, file.name)


def assert_same_content(mine: Any, theirs: Any, left_out: set[str], at: str) -> None:
    if isinstance(theirs, dict):
        # Numbers only: a group's choice of torch's implementation is its own, and FusedAdam counts
        # no step in a group of stage 3.
        implementation = {"foreach", "fused", "capturable", "param_names"}
        if "params" in theirs:
            implementation |= {"step"}
        for key in theirs.keys() - left_out - implementation:
            assert_same_content(mine[key], theirs[key], left_out, f"{at}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs), at
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same_content(one, other, left_out, f"{at}/{index}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs), at
        assert mine.dtype == theirs.dtype, at
    else:
        assert mine == theirs, at


@pytest.mark.parametrize("name", ["z2_w2_fp16", "z3_w2_fp32", *UNIVERSALS, "z0_w2_fp32"])
def test_a_damaged_file_is_refused_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    draw = random.Random(name)
    tag = tag_of(name)
    whole = read(RECORDED / name / tag)
    # DeepSpeed's converter writes what is not trained twice; we read the model's file.
    frozen = ("place", "up.bias", "seen") if name in UNIVERSALS else ()
    every = sorted((RECORDED / name / tag).rglob("*.pt"))
    files = [path for path in every if path.parent.name not in frozen]
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        shutil.copytree(RECORDED / name / tag, folder / tag)
        file = folder / tag / draw.choice(files).relative_to(RECORDED / name / tag)
        data = bytearray(file.read_bytes())
        match attempt % 3:
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(data[: draw.randrange(len(data))])
            case 2:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                file.write_bytes(data)
        found = error = None
        try:
            found = read(folder / tag)
        except SpmdZeroCheckpointError as caught:
            error = caught
        if error is not None:
            assert str(folder) in error.file
        else:
            # A bit between the zip's records, which stands for nothing.
            assert attempt % 3 == 2
            assert_same(whole, found)


class _Runs:
    """Pickles as a call, as an attacker's file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_named(
    tmp_path: Path, zipped: bool, protocol: int
) -> None:
    content = {"module": {}, "optimizer_state_dict": {}, "epoch": _Runs(tmp_path / "ran")}
    options: Any = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        shutil.copytree(RECORDED / "z2_w2_fp16" / TAG, tmp_path / name)
        file = tmp_path / name / name
        torch.save(content, file, **options)
        with pytest.raises(SpmdZeroCheckpointError, match=r"would run or build \S*eval") as caught:
            read(tmp_path / name)
        assert caught.value.file == str(file)
    assert not (tmp_path / "ran").exists()


class Own:
    """A class of the user's, in a client state."""


def test_a_class_that_the_user_vouches_for_is_read(tmp_path: Path) -> None:
    torch.save(Own(), tmp_path / "own.pt")
    with pytest.raises(SpmdZeroCheckpointError, match=r"test_files\.Own, which.*add_safe_globals"):
        read_pt(tmp_path / "own.pt")
    with torch.serialization.safe_globals([Own]):
        assert isinstance(read_pt(tmp_path / "own.pt"), Own)


def test_numpys_numbers_and_arrays_are_read_and_nothing_else_of_numpys(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "z2_w2_fp16" / TAG, tmp_path / "tag")
    file = tmp_path / "tag" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    mine = {
        "score": np.float32(0.5),
        "best": np.int64(3),
        "curve": [np.arange(6.0).reshape(2, 3).T, np.array(7, dtype=">i4")],
        "names": np.array(["a", "bc"]),
        "seen": collections.defaultdict(list, a=[1]),
    }
    torch.save(content | mine, file)
    found = read(tmp_path / "tag").host.client_state
    assert (found["score"], found["best"], found["seen"]) == (0.5, 3, {"a": [1]})
    for array, expected in zip(found["curve"], mine["curve"], strict=True):
        assert np.array_equal(array, expected)
        assert array.dtype == expected.dtype
    assert found["names"].tolist() == ["a", "bc"]
    for value, named in (
        (np.random.default_rng(0), "numpy.random"),
        (np.array([Own()]), "test_files.Own"),
        (np.array([None]), "numpy's dtype O8"),
        (np.zeros(1, dtype=[("a", "f4")]), "numpy's dtype V4"),
    ):
        torch.save(content | {"mine": value}, file)
        with pytest.raises(SpmdZeroCheckpointError) as caught:
            read(tmp_path / "tag")
        assert named in caught.value.reason
        # torch writes its messages for terminals.
        assert "\x1b" not in str(caught.value)


def test_another_parallelism_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "z2_w2_fp16" / TAG, tmp_path / "tag")
    experts = tmp_path / "tag" / "layer_0_expert_0_mp_rank_00_model_states.pt"
    experts.touch()
    with pytest.raises(SpmdZeroCheckpointError, match="mixture of experts"):
        read(tmp_path / "tag")
    experts.unlink()
    (tmp_path / "tag" / "layer_00-model_01-model_states.pt").touch()
    with pytest.raises(SpmdZeroCheckpointError, match="tensor parallelism in the pipeline"):
        read(tmp_path / "tag")


def of_autotp() -> TensorParallel:
    """How the recorded run splits its weights, by the engine's rules for the same JSON."""
    case = CASES[AUTOTP]
    config = load_config(config_of(case, ranks=case["ranks"]))
    return autotp_parts(config, model_of(case)[0], size=case["tp"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_for_autotp_is_read_back_bit_for_bit(tmp_path: Path, stage: int) -> None:
    state = opened(AUTOTP)
    for ranks in (1, 3):
        target = Target(state=state, ranks=ranks, stage=stage, tensor_parallel=of_autotp())
        write_regular(target, tmp_path / "tag")
        assert_same(state, read(tmp_path / "tag").checked())
    write_universal(dataclasses.replace(target, stage=min(stage, 2)), tmp_path / "universal")
    assert_same(state, read(tmp_path / "universal").checked())


def test_a_fused_weight_of_autotp_is_joined_from_its_two_halves() -> None:
    whole = opened(AUTOTP).tensors["parameter/down.weight"]
    parts = [
        torch.load(RECORDED / AUTOTP / TAG / f"mp_rank_0{rank}_model_states.pt")["module"]
        for rank in range(2)
    ]
    first, second = (part["down.weight"] for part in parts)
    # Columns 0 to 24 and 50 to 74 are the first rank's.
    rows = [first[:, :25], second[:, :25], first[:, 25:], second[:, 25:]]
    assert torch.equal(whole.whole(), torch.cat(rows, 1))
    assert torch.equal(whole.read(((3, 9), (20, 60))), torch.cat(rows, 1)[3:9, 20:60])


def altered(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(folder / file, weights_only=False)
    change(content)
    torch.save(content, folder / file)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (1, None, "there is no such file"),
        (0, lambda c: c.pop("universal_checkpoint_info"), "doesn't say how weights are split"),
        (1, lambda c: c["module"].pop("place"), "no place, which rank 0 has"),
        (1, lambda c: c["module"].pop("up.bias"), r"fp32 of up.bias .* not in the model's file"),
        (
            1,
            lambda c: c["module"]["place"].add_(0.5),
            r"parameter/place is the same on each .* rank 1 differs from rank 0's by 0.5",
        ),
    ],
)
def test_parts_of_autotp_that_dont_fit_are_refused(
    tmp_path: Path, file: int, change: Any, words: str
) -> None:
    shutil.copytree(RECORDED / AUTOTP / TAG, tmp_path / "tag")
    name = f"mp_rank_0{file}_model_states.pt"
    if change is None:
        (tmp_path / "tag" / name).unlink()
    else:
        altered(tmp_path / "tag", name, change)
    with pytest.raises(SpmdZeroCheckpointError, match=words):
        read(tmp_path / "tag").checked()


def test_shapes_that_are_no_parts_of_one_weight_are_refused_with_the_numbers() -> None:
    file = RECORDED / AUTOTP / TAG / "mp_rank_00_model_states.pt"
    info = torch.load(file, weights_only=False)["universal_checkpoint_info"]
    for name, shapes, words in (
        ("down.weight", [(24, 50), (24, 40)], r"dim 1, .* \[24, 50\] and \[24, 40\] .*\[24, 100\]"),
        ("head.weight", [(48, 24), (48, 20)], r"dim 0, .* \[48, 24\] and \[48, 20\] .*\[96, 24\]"),
        ("norm.weight", [(24,), (12,)], r"the same on each rank, .* \[24\] and \[12\]"),
    ):
        with pytest.raises(SplitError, match=words):
            read_split(info, name, shapes)
    # A run that can't share a dim equally gives its first ranks more.
    split = read_split(info, "head.weight", [(49, 24), (47, 24)])
    assert split == Split(dim=0, widths=((49, 47),))


def test_what_doesnt_fit_in_the_files_of_stage_3_is_said(tmp_path: Path) -> None:
    names = ("z3_w2_fp32", "z3_w2_fp16", "z2_w2_fp16")
    recorded = {name: RECORDED / name / TAG for name in names}
    model = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    optimizer = model.replace("model", "optim")

    def without(key: str) -> Any:
        content = torch.load(recorded["z3_w2_fp32"] / optimizer, weights_only=False)
        del content["optimizer_state_dict"][key]
        return content

    def of_experts() -> Any:
        content = torch.load(recorded["z3_w2_fp32"] / optimizer, weights_only=False)
        content["optimizer_state_dict"]["ds_zero_partition_groups"] = [{"families": ["x"]}]
        return content

    def swapped() -> Any:
        content = torch.load(recorded["z3_w2_fp32"] / optimizer, weights_only=False)
        flat = content["optimizer_state_dict"]["fp32_flat_groups"]
        flat[0].data = torch.empty(0)
        return content

    for name, content, words in (
        (model, None, "the file of rank 1 is missing, 2 ranks saved"),
        (optimizer, None, "the file of rank 1 is missing, 2 ranks saved"),
        (optimizer, recorded["z3_w2_fp16"] / optimizer, r"flat groups have \[4776, 86\] elements"),
        (optimizer, recorded["z2_w2_fp16"] / optimizer, "no optimizer state of ZeRO-3"),
        (optimizer, without("fp32_flat_groups"), "no optimizer state of ZeRO-3"),
        (optimizer, of_experts(), "mixture of experts"),
        (optimizer, swapped(), "offloaded to NVMe"),
    ):
        folder = tmp_path / words / TAG
        shutil.copytree(recorded["z3_w2_fp32"], folder)
        if content is None:
            (folder / name).unlink()
        elif isinstance(content, Path):
            shutil.copy(content, folder / name)
        else:
            torch.save(content, folder / name)
        with pytest.raises(SpmdZeroCheckpointError, match=words) as caught:
            read(folder)
        assert caught.value.file == str(folder / name)
        shutil.rmtree(tmp_path / words)


def test_an_error_names_the_newest_tag_beside_the_damaged_one(tmp_path: Path) -> None:
    for tag in ("damaged", "whole"):
        shutil.copytree(RECORDED / "z2_w2_fp16" / TAG, tmp_path / tag)
    (tmp_path / "damaged" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(SpmdZeroCheckpointError, match="rank 1") as caught:
        open_state(tmp_path, "damaged")
    assert caught.value.newest == "whole"


def test_a_failed_write_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    state = opened("z1_w2_fp32_tied")
    write_regular(Target(state=state, ranks=2, stage=2), tmp_path / "tag")
    name = "exp_avg/embed.weight"

    def fails(box: Any) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    broken = dataclasses.replace(state.tensors[name], read=fails)
    other = dataclasses.replace(state, tensors={**state.tensors, name: broken})
    with pytest.raises(SpmdZeroCheckpointError, match="No space left"):
        write_regular(Target(state=other, ranks=2, stage=2), tmp_path / "tag")
    assert_same(state, read(tmp_path / "tag"))
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_a_target_that_deepspeed_has_not_is_refused() -> None:
    for stage, ranks in ((0, 2), (4, 2), (2, 0)):
        with pytest.raises(SpmdZeroUsageError):
            Target(state=opened("z2_w2_fp16"), ranks=ranks, stage=stage)
