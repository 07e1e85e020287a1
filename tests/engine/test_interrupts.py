"""Ctrl-C in a step: it arrives, and training and saving go on as if it had not.

An interrupt comes between two lines. Here it is raised at chosen lines of the package in a step.
"""

import asyncio
import copy
import dis
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import held, let_in
from spmdzero.integrations._initialize import initialize_for_client
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

PACKAGE = str(Path(spmdzero.__file__).parent)
ROWS, ACCUMULATION = 16, 2
# After so many steps each way of calling starts what it has compiled.
WARM = 5


@pytest.fixture(autouse=True)
def _ctrl_c_is_pythons() -> Iterator[None]:
    """What a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.line, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(torch.tanh(self.line(self.norm(x)))).squeeze(-1), y)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, generator=generator)


class MyAdamW(torch.optim.AdamW):
    """A user's, whose Python the engine traces."""


def start(client: bool = False, mine: bool = False, **more: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    model = Regression()
    config = engines.config(
        train_micro_batch_size_per_gpu=ROWS // 8,
        gradient_accumulation_steps=ACCUMULATION,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
        zero_allow_untested_optimizer=True,
    )
    config["spmd"] = {"min_shard_elements": 16} | more
    if client:
        config["train_micro_batch_size_per_gpu"] = ROWS
        return initialize_for_client(model=model, config_params=config)[0]
    optimizer = MyAdamW(model.parameters(), lr=1e-3) if mine else None
    if mine:
        del config["optimizer"]
    return spmdzero.initialize(model=model, optimizer=optimizer, config=config)[0]


def one_call(engine: spmdzero.Engine) -> torch.Tensor:
    first = engine.global_steps * ACCUMULATION
    return engine.train_batch(iter([batch(first), batch(first + 1)]))


def three_calls(engine: spmdzero.Engine) -> torch.Tensor:
    """As a loop that is run again where it was interrupted."""
    step, loss = engine.global_steps, torch.zeros(())
    if engine._training.current.backward_done:
        # The interrupt came before `step` had begun, which may be all that is missing.
        engine.step()
    while engine.global_steps == step and engine.micro_steps < (step + 1) * ACCUMULATION:
        loss = engine(*batch(engine.micro_steps))
        engine.backward(loss)
        engine.step()
    return loss


def evaluated(engine: spmdzero.Engine) -> torch.Tensor:
    if engine._training.current.backward_done:
        # A forward would end what waits for its `step`, and this loop would train it again.
        return three_calls(engine)
    with torch.no_grad():
        engine.eval()
        try:
            # What is read is computed by a program of its own.
            engine(*batch(1000)).item()
        finally:
            engine.train()
    return three_calls(engine)


Step = Callable[[spmdzero.Engine], torch.Tensor]
WAYS: dict[str, tuple[Step, dict[str, Any]]] = {
    "train_batch": (one_call, {}),
    "three calls": (three_calls, {}),
    "train_batch, traced": (one_call, {"capture": False}),
    "three calls, traced": (three_calls, {"capture": False}),
    "train_batch, global forward": (one_call, {"forward": "global"}),
    "train_batch, a user's optimizer": (one_call, {"mine": True}),
    "three calls, a user's optimizer": (three_calls, {"mine": True}),
    "evaluation between": (evaluated, {}),
    "a client": (three_calls, {"client": True}),
}
FEW = ["train_batch", "three calls"]


@functools.cache
def exits(code: CodeType) -> frozenset[int]:
    """Where the end of a `with` begins to call `__exit__`, with three times None.

    Python handles signals after calls, and not between a block's last one and this one.
    """
    ops = list(dis.get_instructions(code))
    nones = [op.opname == "LOAD_CONST" and op.argval is None for op in ops]
    begins = [at for at in range(len(ops)) if nones[at : at + 3] == [True] * 3]
    # What the block returns is put below them first.
    begins += [at - 1 for at in begins if ops[at - 1].opname == "SWAP"]
    return frozenset(ops[at].offset for at in begins)


class Interrupt:
    """Has Ctrl-C pressed at a line of the package; `at` counts them from 0, -1 is none.

    Attributes:
        lines: so many were run inside.
        came: whether it was heard of.
    """

    def __init__(self, at: int) -> None:
        self._at, self.lines, self.came = at, 0, False

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.settrace(self._before)
        self.came = kind is KeyboardInterrupt
        return self.came

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        # Python itself drops what is raised in a `__del__`, wherever that runs.
        watched = frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "__del__"
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lasti not in exits(frame.f_code):
            self.lines += 1
            if self.lines == self._at + 1:
                signal.raise_signal(signal.SIGINT)
        return self._line


def state(engine: spmdzero.Engine) -> tuple[Any, ...]:
    applied = engine.named_tensors()["counter/applied"].item()
    schedule = engine.lr_scheduler.last_batch_iteration
    return engine.global_steps, engine.micro_steps, engine.global_samples, schedule, applied


def modes() -> tuple[bool, int, int]:
    """What torch's contexts have switched in this thread."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return torch._C._is_torch_function_enabled(), *stacks


def goes_on(engine: spmdzero.Engine, twin: spmdzero.Engine, step: Step, *, lines: int) -> None:
    """A step of each; that of `engine` is interrupted at a line, and run again if it isn't done."""
    done = twin.global_steps
    with Interrupt(lines) as interrupt:
        step(engine)
    # A step may have fewer lines than the one in which they were counted.
    assert interrupt.came or interrupt.lines <= lines
    assert modes() == (True, 0, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if engine.global_steps == done:
        step(engine)
    step(twin)
    # Each value is the same bit for bit: the same programs ran on the same numbers.
    assert state(engine) == state(twin)
    for name, value in twin.module.named_parameters():
        assert torch.equal(engine.module.get_parameter(name).cpu(), value.cpu())


def pair(way: str) -> tuple[spmdzero.Engine, spmdzero.Engine, Step, int]:
    """Two equal engines, how they are trained, and how many lines a step has."""
    step, how = WAYS[way]
    # What another test's engines hold is gone over in each step until they are collected, which
    # takes lines: steps would have fewer of them later.
    gc.collect()
    engine, twin = start(**how), start(**how)
    for _ in range(WARM):
        step(engine), step(twin)
    with Interrupt(-1) as counting:
        step(engine)
    step(twin)
    return engine, twin, step, counting.lines


@pytest.mark.parametrize("way", FEW)
def test_training_and_saving_go_on_after_an_interrupt_at_a_line(way: str, tmp_path: Path) -> None:
    engine, twin, step, lines = pair(way)
    # Programs are started near the end of a step, and counted after it.
    for at in [0, lines // 3, *(lines * part // 100 for part in (60, 80, 95, 98)), lines - 2]:
        goes_on(engine, twin, step, lines=at)
    engine.save_checkpoint(tmp_path)
    step(twin)
    engine.load_checkpoint(tmp_path)
    step(engine)
    assert state(engine) == state(twin)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_after_an_interrupt_at_each_line(way: str) -> None:
    engine, twin, step, lines = pair(way)
    # A step whose operations are recorded or traced has tens of thousands of lines, most of them
    # the same for each operation: 1,500 of them took more than five minutes.
    for at in range(0, lines - 1, max(1, lines // (1500 if lines < 10_000 else 400))):
        goes_on(engine, twin, step, lines=at)


@pytest.mark.slow
def test_training_and_saving_go_on_after_an_interrupted_save(tmp_path: Path) -> None:
    engine, twin, step, _ = pair("train_batch")
    with Interrupt(-1) as counting:
        engine.save_checkpoint(tmp_path, tag="counting")
    for at in range(0, counting.lines - 1, max(1, counting.lines // 100)):
        with Interrupt(at):
            engine.save_checkpoint(tmp_path, tag=f"at{at}")
        step(engine), step(twin)
        assert state(engine) == state(twin)
    engine.save_checkpoint(tmp_path, tag="last")
    fresh = start()
    fresh.load_checkpoint(tmp_path, tag="last")
    step(fresh), step(twin)
    assert state(fresh) == state(twin)


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    return start()


def press(_: Any = None) -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_loop_that_is_run_again_after_an_interrupted_backward_starts_its_step_anew(
    engine: spmdzero.Engine,
) -> None:
    twin = copy.deepcopy(engine.module).cpu()
    before = engine.micro_steps
    engine.backward(engine(*batch(0)))
    engine.step()
    loss = engine(*batch(1))
    loss.register_hook(press)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(loss)
    assert engine.micro_steps == before
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.module.load_state_dict(twin.state_dict())


@pytest.fixture
def handler() -> Iterator[Callable[..., list[int]]]:
    """Sets a handler that takes note of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    def use(*numbers: int) -> list[int]:
        for number in numbers:
            signal.signal(number, handle)
        return heard

    yield use
    for number, own in before.items():
        signal.signal(number, own)


def test_a_users_own_handler_is_called_once_and_nothing_is_undone(
    engine: spmdzero.Engine, handler: Any
) -> None:
    heard = handler(signal.SIGINT, signal.SIGTERM)
    own = signal.getsignal(signal.SIGINT)
    loss = engine(*batch(0))
    loss.register_hook(press)
    loss.register_hook(lambda _: signal.raise_signal(signal.SIGTERM))
    engine.backward(loss)
    assert sorted(heard) == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is own
    before = engine.micro_steps
    engine.step()
    assert engine.micro_steps == before + 1
    while not engine.is_first_micro_batch():
        engine.backward(engine(*batch(0)))
        engine.step()


def test_the_users_own_code_is_interrupted_at_once(engine: spmdzero.Engine) -> None:
    reached: list[str] = []

    def data() -> Iterator[Any]:
        press()
        reached.append("data")
        yield batch(0)

    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(data())

    def forward(*_: Any) -> None:
        press()
        reached.append("forward")

    hook = engine.module.line.register_forward_hook(forward)
    with pytest.raises(KeyboardInterrupt):
        engine(*batch(0))
    hook.remove()
    assert not reached
    one_call(engine)


def test_the_third_press_waits_for_no_end() -> None:
    reached: list[str] = []

    def insist() -> None:
        with held():
            press()
            press()
            reached.append("two")
            press()
            reached.append("three")

    with pytest.raises(KeyboardInterrupt):
        insist()
    assert reached == ["two"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # None of them is left over.
    with held():
        pass


def test_sections_inside_of_the_users_code_hold_too() -> None:
    reached: list[str] = []

    def inside() -> None:
        with held(), let_in(), held():
            press()
            reached.append("held")

    def before() -> None:
        with held():
            press()
            with let_in():
                reached.append("let in")

    for interrupted in (inside, before):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert reached == ["held"]


def test_in_another_thread_nothing_is_held(engine: spmdzero.Engine) -> None:
    failures: list[BaseException] = []
    before = engine.global_steps

    def train() -> None:
        try:
            one_call(engine)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (engine.global_steps, failures) == (before + 1, [])


def test_under_asyncio_the_task_is_cancelled_after_the_step(engine: spmdzero.Engine) -> None:
    before = engine.global_steps

    async def train() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, asyncio.current_task().cancel)
        with Interrupt(500):
            one_call(engine)
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train())
    assert engine.global_steps == before + 1
