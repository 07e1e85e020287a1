"""A loop that compiles at every step is told so once, with what is another each time."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

import spmdzero
from spmdzero.engine._programs import Call, Compiled, ProgramLog, difference
from tests.engine.captured import make_engine
from tests.support.engines import Squares

pytestmark = pytest.mark.backends("jax", "torch_xla")

ROWS, WIDTH = 16, 12
Step = Callable[[spmdzero.Engine, int], torch.Tensor]


def slice_on_the_devices(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    data = torch.zeros(160, WIDTH, device=engine.device) + 1.5
    return engine(data[index : index + ROWS])


def another_length(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    return engine(torch.ones(ROWS, index + 1, WIDTH))


def values_between_the_calls(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    torch.ones(index + 1, 3, device=engine.device).sum().item()
    return engine(torch.ones(ROWS, WIDTH))


def a_shape_in_the_loss(engine: spmdzero.Engine, index: int) -> torch.Tensor:
    return engine(torch.ones(ROWS, WIDTH)) * torch.ones(index + 1, device=engine.device).sum()


FILE = "tests/engine/test_compiling_steps.py"
SLICED = f"{FILE}:{slice_on_the_devices.__code__.co_firstlineno + 2}"


def run(step: Step, count: int) -> Iterator[spmdzero.Engine]:
    engine = make_engine(Squares(WIDTH))
    for index in range(count):
        engine.backward(step(engine, index))
        engine.step()
        yield engine


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (slice_on_the_devices, ("slice of f32[160,12] at /", SLICED, "data set on the CPU")),
        (another_length, ("input 'x': float32[16, 5, 12] -> float32[16, 6, 12]", "pad")),
        (
            values_between_the_calls,
            ("script between the engine's calls", "Compute them on the CPU"),
        ),
        (a_shape_in_the_loss, ("The same inputs give another graph each time", f"{FILE}:")),
    ],
)
def test_a_loop_that_compiles_at_each_step_is_told_why_once(
    step: Step, said: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spmdzero"):
        *_, engine = run(step, 8)
    (line,) = [line for line in caplog.messages if "steps compiled" in line]
    for part in said:
        assert part in line
    assert engine.programs.compiling.steps == 8
    (check,) = engine.doctor().of("compiling steps")
    assert "8 of 8 steps compiled" in check.said


def test_a_loop_of_a_few_shapes_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    *_, engine = run(lambda engine, index: another_length(engine, 20 + index % 3), 9)
    assert engine.programs.compiling.steps == 3
    assert engine.programs.compiling.said is None
    assert not [line for line in caplog.messages if "steps compiled" in line]


def test_a_ledger_of_each_step_is_not_the_scripts_doing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(Squares(WIDTH))
    for _ in range(8):
        with spmdzero.record_ledgers(engine):
            engine.backward(engine(torch.ones(ROWS, WIDTH)))
            engine.step()
    assert engine.programs.compiling.said is None
    assert not [line for line in caplog.messages if "steps compiled" in line]


def test_equal_programs_are_said_to_be_lost_or_of_other_buffers() -> None:
    program = "%a.1 = f32[2] add(%p.2, %p.3)\n"
    assert "XLA_COMPILATION_CACHE_SIZE" in difference(program, program.replace(".2", ".7"))


def test_a_number_in_a_program_is_named_with_both_its_values() -> None:
    program = '%c.1 = f32[] constant({}), metadata={{source_file="/a/b.py" source_line=3}}'
    assert "constant of f32[] at /a/b.py:3 is another each time (2.5, then 3.5)" in difference(
        program.format(2.5), program.format(3.5)
    )


def test_a_loop_of_ever_new_lengths_is_remembered_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is of all engines, and these programs are none.
    monkeypatch.setattr(ProgramLog, "_launched", Compiled())
    log = ProgramLog()

    def launch(length: int) -> bool:
        log.called(Call(inputs=(("x", (8, length), "float32"),), training=True, gradients=True))
        log.launched("boundary", length, Compiled(count=1))
        return log.compilations[-1].known

    assert not launch(0)
    for length in range(1, 1500):
        assert not launch(length)
        # What comes back goes on being known.
        assert launch(1)
    assert launch(1499)
    # The first of them would be kept for ever.
    assert not launch(0)
