"""What scripts for GPUs write around a model and an engine: it trains all the same, and is told."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero._cuda import INSTEAD
from tests.support.processes import ROOT, run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), labels)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x.argmax(dim=1) % 3


def start(model: nn.Module) -> spmdzero.Engine:
    return spmdzero.initialize(model=model, config=CONFIG)[0]


def losses(engine: spmdzero.Engine, wrap: Callable[[Any], Any] = lambda step: step) -> list[float]:
    """The losses of three steps, each called through what `wrap` makes of a step."""

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine(x, labels)
        engine.backward(loss)
        engine.step()
        return loss

    wrapped = wrap(step)
    return [wrapped(*rows(index)).item() for index in range(3)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(start(Classifier()))


def refuse_to_compile(graph: Any, inputs: Any) -> Any:
    raise AssertionError("torch's compiler got a graph of the model")


def compiled(target: Any) -> Any:
    return torch.compile(target, backend=refuse_to_compile)


@pytest.fixture
def alone() -> None:
    """A process group of one process, without which torch makes no DistributedDataParallel."""
    spmdzero.init_distributed()


WRAPPERS = {
    "torch.compile": compiled,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_in_a_wrapper_for_gpus_trains_as_the_module_in_it(
    name: str, plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    module = Classifier()
    wrapped = WRAPPERS[name](module)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        engine = start(wrapped)
    assert engine.module is module
    assert next(iter(engine.module.state_dict())) == "first.weight"
    assert losses(engine) == plain
    assert f"{name}(model) has no effect of its own" in caplog.text
    # The script's own name for its model still computes.
    with torch.no_grad():
        assert wrapped(*(each.to(engine.device) for each in rows(0))).item() < plain[0]


@pytest.mark.usefixtures("alone")
def test_wrappers_around_wrappers_are_all_taken_off() -> None:
    module = Classifier()
    assert start(nn.parallel.DistributedDataParallel(compiled(module))).module is module


def test_compiled_parts_of_a_model_run_uncompiled(
    plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    model = Classifier()
    model.first = compiled(model.first)
    model.second.compile(backend=refuse_to_compile)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert losses(start(model)) == plain
    assert "torch.compile of first, second has no effect of its own" in caplog.text


# Of Dynamo's own look at a loss of torch_xla, as a lone process doesn't show it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_step_is_xlas(plain: list[float], caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Classifier())
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert losses(engine, compiled) == plain
    assert caplog.text.count("torch.compile around the engine has no effect") == 1


def test_a_compiled_engine_is_xlas(plain: list[float], caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Classifier())
    call = compiled(engine)
    found = []
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        for index in range(3):
            loss = call(*rows(index))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert found == plain
    assert caplog.text.count("torch.compile around the engine has no effect") == 1
    # What a script compiles besides is torch's.
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
MODEL, TENSOR = "spmdzero.initialize places it", r"leave .*of a batch out.*\.to\(engine.device\)"
ASKS = {
    "model.cuda": (lambda: nn.Linear(2, 2).cuda(), MODEL),
    "model.to": (lambda: nn.Sequential(nn.Linear(2, 2)).to("cuda"), MODEL),
    "batch.cuda": (lambda: torch.ones(2).cuda(), TENSOR),
    "batch.to": (lambda: torch.ones(2).to("cuda:0"), TENSOR),
    "zeros": (lambda: torch.zeros(2, device="cuda"), TENSOR),
    "synchronize": (torch.cuda.synchronize, r"get_accelerator\(\).synchronize\(\)"),
    "set_device": (lambda: torch.cuda.set_device(0), r"get_accelerator\(\).set_device\(...\)"),
    "get_device_name": (torch.cuda.get_device_name, r"get_accelerator\(\).device_name\(\)"),
    "stream": (lambda: torch.cuda.current_stream(), "leave torch.cuda.current_stream out"),
}


@without_cuda
@pytest.mark.parametrize("name", ASKS)
def test_a_script_that_asks_for_cuda_is_told_what_to_write(name: str) -> None:
    ask, write = ASKS[name]
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        ask()
    *_, told = str(caught.value).splitlines()
    assert re.search(rf"{Path(__file__).name}:\d+: there is no CUDA here.*{write}", told)


@without_cuda
def test_a_torch_without_cudas_code_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_setDevice", raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with pytest.raises(AssertionError, match=r"get_accelerator\(\).set_device"):
        torch.cuda.set_device(0)


def test_what_is_named_in_the_place_of_cudas_calls_is_there() -> None:
    accelerator = spmdzero.get_accelerator()
    for name, call in INSTEAD.items():
        assert callable(getattr(torch.cuda, name))
        assert callable(getattr(accelerator, call.partition("(")[0]))


BEFORE = """
import spmdzero
import torch
try:
    torch.nn.Linear(2, 2).cuda()
except (AssertionError, RuntimeError) as error:
    assert "spmdzero.initialize places it" in str(error), error
"""


@without_cuda
@pytest.mark.parametrize("first", ["spmdzero", "torch"])
def test_cuda_is_explained_before_anything_has_started(first: str) -> None:
    run_python("-c", f"import {first}\n{BEFORE}", fresh=True)


@without_cuda
@pytest.mark.filterwarnings("ignore:.*CUDA.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning")
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cuda", dtype=torch.float16),
        lambda: torch.cuda.amp.autocast(),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
)
def test_an_autocast_that_is_off_says_what_to_write(
    context: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Classifier())
    with torch.autocast("cuda", enabled=False), torch.autocast("xla", dtype=torch.bfloat16):
        engine(*rows(0))
    assert "autocast" not in caplog.text
    for _ in range(2):
        with context():
            assert engine(*rows(0)).dtype == torch.float32
    (said,) = [line for line in caplog.messages if "autocast" in line]
    assert re.search(
        r'test_gpu_scripts.py:\d+: torch.autocast\("c.*is off.*"bf16".*engine.device.type', said
    )


@without_cuda
@pytest.mark.filterwarnings("ignore:.*CUDA.*:UserWarning")
def test_an_autocast_that_asks_a_missing_gpu_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So it is where torch_xla is installed.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    told = r'test_gpu_scripts.py:\d+: torch.autocast\("cuda"\) is off'
    with pytest.raises(RuntimeError, match=told):
        torch.autocast("cuda", dtype=torch.bfloat16)


@without_cuda
@pytest.mark.filterwarnings("ignore:.*GradScaler:UserWarning")
@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")
@pytest.mark.parametrize("make", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
def test_a_scaler_without_cuda_says_what_to_write(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.amp.GradScaler("cuda", enabled=False)
    assert not caplog.messages
    for _ in range(2):
        make()
    (said,) = caplog.messages
    assert re.search(
        r'test_gpu_scripts.py:\d+: GradScaler is for CUDA.*"fp16".*engine.step\(\)', said
    )


# As it stands in scripts for GPUs, before anything of the engine.
NCCL = """
import os
import sys
sys.stderr = sys.stdout
import torch
import torch.distributed as dist
import spmdzero
from torch.distributed.distributed_c10d import init_process_group

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda:0"))
group = dist.new_group([0], backend="nccl")
dist.barrier(group=group)
engine, *_ = spmdzero.initialize(
    model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1}
)
print(dist.get_backend(), dist.get_backend(group), dist.get_world_size(), engine.dp_world_size)
"""


@without_cuda
def test_a_group_of_nccl_is_one_of_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NCCL)
    printed = run_python(str(tmp_path / "train.py"), devices=2, fresh=True, PYTHONPATH=str(ROOT))
    assert printed.splitlines()[-1] == "gloo gloo 1 2"
    assert re.search(r"train.py:12: 'cpu:gloo,cuda:nccl': there is no CUDA here: gloo", printed)
    assert printed.count("there is no CUDA here") == 1
