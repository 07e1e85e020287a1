"""`get_accelerator()` tells the truth about this host's devices."""

import pytest
import torch
from spmdzero.accelerator import get_accelerator
from torch import nn

import spmdzero
from spmdzero.backend import runtime
from tests.support.engines import Mean, start
from tests.support.processes import run_python


def test_devices_of_the_host_are_counted_and_one_virtual_device_is_named() -> None:
    accelerator = get_accelerator()
    assert accelerator.device_count() == 8
    assert accelerator.device_name() == "xla"
    assert torch.ones(1).to(accelerator.current_device_name()).device == runtime.device()
    assert accelerator.is_available()
    assert accelerator.communication_backend_name() == "gloo"
    accelerator.set_device(3)
    with accelerator.device(0):
        assert accelerator.current_device() == 0


def test_tensors_are_told_apart_by_where_they_are() -> None:
    accelerator = get_accelerator()
    made = accelerator.BFloat16Tensor([1.0, 2.0])
    assert (accelerator.on_accelerator(made), made.dtype) == (True, torch.bfloat16)
    assert accelerator.LongTensor(2, 3).shape == (2, 3)
    assert not accelerator.on_accelerator(torch.ones(1))
    assert not accelerator.is_pinned(torch.ones(1))


def test_synchronize_waits_for_what_was_started() -> None:
    value = torch.ones(2).to(get_accelerator().device_name()) + 1
    runtime.sync()
    get_accelerator().synchronize()
    assert value.tolist() == [2.0, 2.0]


def test_the_random_state_is_torchs() -> None:
    accelerator = get_accelerator()
    accelerator.manual_seed(5)
    assert accelerator.initial_seed() == 5
    state = accelerator.get_rng_state()
    first = torch.rand(2)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    assert accelerator.random() is torch.random


RANKS = {
    "engine.local_rank": lambda engine: engine.local_rank,
    "current_device()": lambda _: get_accelerator().current_device(),
}


@pytest.mark.parametrize("rank", RANKS)
def test_a_local_rank_is_the_devices_to_torch(rank: str) -> None:
    engine = start(Mean())
    index = RANKS[rank](engine)
    moved = [
        torch.ones(2).to(index),
        torch.ones(2).to(device=index, dtype=torch.bfloat16),
        torch.ones(2, device=engine.device).to(index),
        torch.tensor([1.0], device=index),
        torch.as_tensor([1.0], device=index),
        next(nn.Linear(2, 2).to(index).parameters()),
    ]
    assert {tensor.device for tensor in moved} == {engine.device}
    assert moved[1].dtype == torch.bfloat16
    engine.backward(engine(torch.ones(8, 4).to(index)))
    engine.step()


def test_what_asks_for_cuda_is_told_the_line_and_the_device() -> None:
    runtime.start()
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"test_accelerator.py:\d+: device 3 of"):
        torch.ones(2).to(3)
    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    calls = [lambda: torch.ones(2).cuda(), lambda: torch.zeros(2, device=0)]
    for call in calls:
        with pytest.raises((AssertionError, RuntimeError), match=r"accelerator.*:\d+: there is no"):
            call()


MEMORY = """
import torch
from torch import nn
from spmdzero.accelerator import get_accelerator

accelerator = get_accelerator()
accelerator.reset_peak_memory_stats()
before = accelerator.memory_allocated()
held = torch.ones(2**24)
# 64 MiB more; the allocator may have had some of them.
assert accelerator.memory_allocated() - before > 2**25
del held
assert accelerator.max_memory_allocated() >= before + 2**25
assert accelerator.memory_stats()["allocated_bytes.all.peak"] >= before
assert accelerator.available_memory() < accelerator.total_memory()
"""


def test_memory_of_cpu_devices_is_the_process() -> None:
    # A process of its own: of this one's gigabytes the kernel may take some back at any time.
    run_python("-c", MEMORY, devices=8)


def test_ranges_name_operations_and_may_nest() -> None:
    accelerator = get_accelerator()
    accelerator.range_push("outer")
    accelerator.range_push("inner")
    accelerator.range_pop()
    accelerator.range_pop()
    accelerator.range_pop()


def test_dtypes_that_a_config_can_train_in_are_supported() -> None:
    accelerator = get_accelerator()
    for dtype in accelerator.supported_dtypes():
        assert torch.ones(2, dtype=dtype).to(accelerator.device_name()).sum().item() == 2
    assert accelerator.is_bf16_supported()
    assert accelerator.is_fp16_supported()


def test_streams_and_events_are_refused() -> None:
    for name in ("Stream", "Event", "current_stream"):
        with pytest.raises(spmdzero.SpmdZeroUsageError, match="has no streams"):
            getattr(get_accelerator(), name)()
