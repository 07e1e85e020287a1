"""accelerate on spmdzero: a script's numbers are those of the same script without DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.environments import Environment
from tests.support.deepspeed import run_ranks
from tests.support.processes import ROOT, run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

Seen = dict[str, Any]
ORDERS: dict[str, Seen] = {
    "dummies": {"evaluate_after": 10},
    "accumulation": {"gas": 4},
    "own": {"optimizer": "torch", "schedule": "torch", "stage": 1},
    "callable": {"schedule": "callable", "gas": 4},
    "plugin": {"config": "none", "optimizer": "torch", "schedule": "torch", "gas": 4},
    # An epoch of 3 micro-batches: its second step has one.
    "cut": {"data": 48, "gas": 2},
    # 16, 16 and 5 rows, over and over.
    "uneven": {"data": 37, "evaluate_after": 10},
    "frozen": {"frozen": True},
}
# fp32 of two orders of summation: 1e-7 apart in each operation, and 20 steps of AdamW.
TOLERANCE = 1e-5


def loop(roles: str, orders: list[Seen], *, devices: int) -> dict[str, list[Seen]]:
    module = "tests.integrations.accelerate_loop"
    printed = run_python("-m", module, roles, json.dumps(orders), devices=devices)
    return json.loads(printed.splitlines()[-1])


def launched(*options: str, order: Seen, devices: int = 8) -> Seen:
    """What the loop saw under `accelerate launch`, with spmdzero as its deepspeed."""
    cli = ("-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    script = ("--module", "tests.integrations.accelerate_loop", "spmdzero", json.dumps([order]))
    printed = run_python(*cli, *options, *script, devices=devices)
    (seen,) = json.loads(printed.splitlines()[-1])["spmdzero"]
    return seen


def features(folder: Path, *names: str, devices: int) -> dict[str, Seen]:
    module = "tests.integrations.accelerate_features"
    printed = run_python("-m", module, str(folder), *names, devices=devices)
    return json.loads(printed.splitlines()[-1])


def assert_same_numbers(ours: Seen, plain: Seen) -> None:
    for name in ("losses", "norms", "lr"):
        assert ours[name] == pytest.approx(plain[name], rel=TOLERANCE), name
    assert ours["lr"][0] != ours["lr"][-1]
    assert ours["losses"][-1] < ours["losses"][0] - 0.3


def assert_same_evaluation(ours: Seen, plain: Seen) -> None:
    # Two whole batches of 16 rows, and one of 5.
    assert ours["rows"] == plain["rows"] == 37
    assert ours["guesses"] == plain["guesses"]
    assert ours["eval losses"] == pytest.approx(plain["eval losses"], rel=TOLERANCE)


def test_a_script_on_8_devices_has_the_numbers_of_accelerate_alone():
    seen = loop("plain,spmdzero", [ORDERS["uneven"]], devices=8)
    (plain,), (ours,) = seen["plain"], seen["spmdzero"]
    # Collectives before anything is prepared.
    assert ours["before"] == plain["before"] == [["a"], ["b"], [1.0], [1.0]]
    assert_same_numbers(ours, plain)
    assert_same_evaluation(ours, plain)


@pytest.fixture(scope="module")
def plain() -> dict[str, Seen]:
    return dict(zip(ORDERS, loop("plain", list(ORDERS.values()), devices=1)["plain"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_way_to_configure_it_has_the_numbers_of_accelerate_alone(
    plain: dict[str, Seen], devices: int
):
    names = list(ORDERS) if devices == 8 else ["accumulation", "uneven"]
    seen = loop("spmdzero", [ORDERS[name] for name in names], devices=devices)["spmdzero"]
    for name, ours in zip(names, seen, strict=True):
        assert_same_numbers(ours, plain[name])
        if ORDERS[name].get("evaluate_after"):
            assert_same_evaluation(ours, plain[name])


LAUNCHED_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 1
mixed_precision: 'no'
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
"""
DEEPSPEED_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("told_by", ["config file", "options", "DeepSpeed's config"])
def test_what_accelerate_launch_is_told_reaches_the_engine(
    plain: dict[str, Seen], told_by: str, stage: int, tmp_path: Path
):
    if told_by == "config file":
        text = LAUNCHED_CONFIG + "  zero3_init_flag: true\n" * (stage == 3)
        (tmp_path / "accelerate.yaml").write_text(
            text.replace("zero_stage: 2", f"zero_stage: {stage}")
        )
        options = ["--config_file", str(tmp_path / "accelerate.yaml")]
    else:
        options = ["--use_deepspeed", "--num_processes", "1"]
        if told_by == "options":
            options += ["--zero_stage", f"{stage}", "--gradient_accumulation_steps", "4"]
            options += ["--gradient_clipping", "1.0"]
            if stage == 3:
                options += ["--zero3_init_flag", "true", "--zero3_save_16bit_model", "true"]
        else:
            # Of so small a model too a parameter is to rest as shards.
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            config = DEEPSPEED_CONFIG | {"zero_optimization": zero}
            (tmp_path / "ds.json").write_text(json.dumps(config))
            options += ["--deepspeed_config_file", str(tmp_path / "ds.json")]
    ours = launched(*options, order=ORDERS["plugin"] | {"config": "launched"})
    assert_same_numbers(ours, plain["plugin"])


@pytest.mark.backends("jax")
def test_fp8_is_the_engines_own_products():
    printed = run_python("-m", "tests.integrations.accelerate_fp8", devices=8)
    seen = json.loads(printed.splitlines()[-1])
    assert seen["fp8"] == seen["launched"] == pytest.approx(seen["bf16"], rel=5e-3)
    assert seen["fp8"] != seen["bf16"]
    # What the JSON says of them stays.
    assert seen["by rows"] == seen["named"] != seen["fp8"]


# To JAX they are hosts that train together: tests/jax_backend/test_clients.py.
@pytest.mark.backends("torch_xla")
@pytest.mark.slow
def test_a_launcher_of_several_processes_on_a_host_is_refused():
    told = ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "2"]
    order = {"config": "launched", "optimizer": "torch", "schedule": "torch"}
    with pytest.raises(AssertionError, match="launcher started 2 processes"):
        launched(*told, order=order)


@pytest.mark.slow
def test_where_the_name_is_installed_the_launcher_needs_nothing_in_the_script(
    plain: dict[str, Seen], tmp_path: Path
):
    environment = Environment(tmp_path)
    environment.install()
    order = ORDERS["plugin"] | {"config": "launched"}
    options = "launch --use_deepspeed --num_processes 1 --main_process_port 0 --zero_stage 2"
    options += " --gradient_accumulation_steps 4 --gradient_clipping 1.0 --module"
    done = environment.run(
        *("python", "-m", "accelerate.commands.accelerate_cli", *options.split()),
        *("tests.integrations.accelerate_loop", "installed", json.dumps([order])),
        cwd=ROOT,
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="8",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (ours,) = json.loads(done.stdout.splitlines()[-1])["installed"]
    assert_same_numbers(ours, plain["plugin"])
    program = "import transformers as t; t.TrainingArguments('out', bf16=True); print('taken')"
    done = environment.run("python", "-c", program, ACCELERATE_USE_DEEPSPEED="true")
    assert done.stdout == "taken\n", done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Seen]:
    """What each of these saw, in one process."""
    names = ("save_and_resume", "export", "without_sync", "steady", "collectives", "refusals")
    return features(folder, *names, devices=8)


@pytest.mark.slow
def test_a_state_resumes_bit_for_bit_and_on_other_devices(folder: Path, found: dict[str, Seen]):
    seen = found["save_and_resume"]
    assert seen["resumed"] == seen["straight"]
    assert seen["lr resumed"] == seen["lr"]
    assert seen["same weights"]
    elsewhere = features(folder, "resume", devices=2)["resume"]
    assert elsewhere["resumed"] == pytest.approx(seen["straight"], rel=TOLERANCE)


@pytest.mark.slow
def test_the_weights_leave_as_plain_transformers_reads_them(folder: Path, found: dict[str, Seen]):
    assert found["export"] == {"class": "GPT2LMHeadModel", "devices": ["cpu"]}
    expected = torch.load(folder / "weights.pt")
    program = (
        "import sys, torch, transformers as t; from pathlib import Path;"
        "folder = Path(sys.argv[1]);"
        "got = {n: t.GPT2LMHeadModel.from_pretrained(folder / n).state_dict()"
        " for n in ('pretrained', 'without_dict')};"
        "torch.save(got, folder / 'read.pt')"
    )
    run_python("-c", program, str(folder), USE_TORCH_XLA="false")
    for name, read in torch.load(folder / "read.pt").items():
        assert read.keys() == expected.keys(), name
        assert all(torch.equal(read[key], value) for key, value in expected.items()), name
    from safetensors.torch import load_file

    saved = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(value, expected[key]) for key, value in saved.items())
    # Tied weights are saved once.
    assert expected.keys() - saved.keys() <= {"lm_head.weight"}


@pytest.mark.slow
def test_micro_batches_by_hand_are_those_of_accumulate(found: dict[str, Seen]):
    for stage, seen in found["without_sync"].items():
        assert seen["by hand"] == pytest.approx(seen["accumulated"], rel=TOLERANCE), stage


@pytest.mark.slow
def test_no_step_after_the_third_compiles_or_reads_what_the_script_does_not(found: dict[str, Seen]):
    compiled, (*reads, read) = found["steady"]["compiled"], found["steady"]["reads"]
    assert compiled[0] < compiled[3]
    assert set(compiled[3:]) == {compiled[3]}
    assert set(reads[3:]) == {reads[3]}
    assert read > reads[3]


@pytest.mark.slow
def test_collectives_take_outputs_of_the_engine(found: dict[str, Seen]):
    seen = found["collectives"]
    loss = seen.pop("loss")
    assert seen.pop("gathered loss") == [loss]
    assert seen.pop("sum") == loss
    assert seen == {
        "gathered logits": [16, 32, 128],
        "mean": [2.0, 4.0],
        "padded": [16, 32, 128],
        "objects": ["a", "b"],
        "printed": "once\n",
        "triggered": True,
        "parts": [1, 2, 3],
        "processes": 1,
        "main": True,
        "device": "cpu",
        "type": "DistributedType.DEEPSPEED",
        "freed": [None, None],
        "engine": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"),
    {
        "_offload": "SpmdZeroConfigError: zero_optimization.offload_optimizer.device = 'nvme'",
        # accelerate's own.
        "_two": "AssertionError: You can't use same `Accelerator()` instance with multiple models",
        "_second": "SpmdZeroUsageError: backward of a loss that this engine's forward had no part",
        "_plain_backward": "SpmdZeroUsageError: optimizer.step() of accelerate after loss.back",
        "_tensor": "SpmdZeroConfigError: spmd.mesh.tensor = 4",
        "_hosts": "SpmdZeroUsageError: accelerate counts 1 process, and 4 hosts train together",
    }.items(),
)
def test_what_is_not_here_says_so(found: dict[str, Seen], what: str, why: str):
    assert why in found["refusals"][what]


@pytest.mark.slow
def test_each_host_reads_its_own_rows():
    module = ["-m", "tests.integrations.two_hosts"]
    told = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    printed = run_ranks(module, ranks=2, cwd=ROOT, timeout=300, **told)
    seen = [json.loads(text.splitlines()[-1]) for text in printed]
    assert [host.pop("rows") for host in seen] == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]
    here = {"gathered": [0, 1], "processes": 2, "device": "cpu"}
    assert seen == [here | {"type": "DistributedType.DEEPSPEED"}] * 2
