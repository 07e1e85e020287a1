"""The comms logger counts what one step really sends."""

import collections
import gc
import logging
import weakref

import pytest
import torch

import spmdzero
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.profiling import comms
from tests.support.engines import start

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS, WIDTH = 8, 128
BYTES = WIDTH * WIDTH * 4


def engine_with(**comms_logger: object) -> spmdzero.Engine:
    return start(
        torch.nn.Linear(WIDTH, WIDTH, bias=False),
        gradient_accumulation_steps=3,
        comms_logger={"enabled": True, **comms_logger},
        memory_breakdown=True,
    )


def train_one_step(engine: spmdzero.Engine) -> None:
    for _ in range(3):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    engine = engine_with()
    train_one_step(engine)
    return engine


Sent = collections.Counter[tuple[str, int]]


def sent_by(engine: spmdzero.Engine) -> Sent:
    """How often one step sends a message of an operation and a size."""
    found = Sent()
    for message, count in comms.messages(engine).items():
        found[message.operation, message.bytes] += count
    return found


def totals() -> Sent:
    """What `log_summary` counts of all engines of this process, other tests' among them."""
    counts = spmdzero.comm.log_summary(return_dict=True)
    assert counts is not None
    return Sent({(name, size): n for name, sizes in counts.items() for size, n in sizes.items()})


def test_stage_2_sends_each_gradient_once_a_micro_batch_and_each_parameter_once_a_step(
    engine: spmdzero.Engine,
) -> None:
    assert sent_by(engine)["reduce_scatter", BYTES] == 3
    assert sent_by(engine)["all_gather", BYTES] == 1
    header, *rows = comms.summary(engine).splitlines()
    assert header.split() == ["Comm.", "Op", "dtype", "Message", "Size", "Count", "per", "step"]
    assert [row.split() for row in rows if row.startswith("reduce_scatter")] == [
        ["reduce_scatter", "f32", "64", "KB", "3"]
    ]


def test_comm_log_summary_counts_what_the_engines_logged(
    engine: spmdzero.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    before = totals()
    other = engine_with()
    train_one_step(other)
    sent = sent_by(other)
    assert sent["all_gather", BYTES] == 1
    assert totals() - before == sent
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        totals()
    assert comms.summary(engine) in caplog.messages
    # As DeepSpeed's totals, they are the process's: an engine that is gone has sent what it sent.
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert totals() - before == sent
    with pytest.raises(SpmdZeroUsageError, match="could time them"):
        spmdzero.comm.log_summary(show_straggler=True)


def test_prof_ops_choose_operations_verbose_logs_them_and_memory_is_logged_at_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with(prof_all=False, prof_ops=["all_gather"], verbose=True)
    with pytest.raises(SpmdZeroUsageError, match="train one step first"):
        comms.summary(engine)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        train_one_step(engine)
    assert {m.operation for m in comms.messages(engine)} == {"all_gather"}
    assert comms.summary(engine) in caplog.messages
    (memory,) = [m for m in caplog.messages if m.startswith("step=1, live tensors of the engine")]
    # A replicated fp32 parameter, and an eighth of both moments.
    assert f"parameter {BYTES:,}" in memory
    assert f"moment {2 * BYTES // 8:,}" in memory


def test_another_number_of_micro_batches_is_counted_anew() -> None:
    engine = engine_with()
    engine.set_train_batch_size(ROWS)
    data = [torch.randn(ROWS, WIDTH)]

    def train() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*data).square().mean())
            engine.step()

    train()
    assert sent_by(engine)["reduce_scatter", BYTES] == 1
    before = totals()
    engine.set_train_batch_size(2 * ROWS)
    train()
    train()
    assert sent_by(engine)["reduce_scatter", BYTES] == 2
    # In the place of what it sent before.
    assert totals() - before == {("reduce_scatter", BYTES): 1, ("all_reduce", 4): 1}
