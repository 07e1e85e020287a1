"""Calls that DeepSpeed refuses, to be made of either library."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# One row for each of the eight devices.
BATCH = torch.ones(8, 4)
LOCAL = (
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
)


class Calls:
    """The calls, made of one library, whose engines are made once.

    Args:
        library: `deepspeed` or `spmdzero`.
        schedules: the library's `runtime.lr_schedules`.
    """

    def __init__(self, library: Any, schedules: Any) -> None:
        self._library, self._schedules = library, schedules
        self._engines: dict[str, Any] = {}

    def engine(self, stage: int = 1, **more: Any) -> Any:
        """The engine of these settings; a key that is None is left out of the config."""
        name = f"{stage} {more}"
        if name not in self._engines:
            usual = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": stage},
            }
            config = {key: value for key, value in (usual | more).items() if value is not None}
            self._engines[name] = self._library.initialize(model=nn.Linear(4, 4), config=config)[0]
        return self._engines[name]

    def all(self) -> dict[str, Callable[[], Any]]:
        """Name -> call."""
        return dict([*self._contexts(), *self._steps(), *self._others(), *self._of_schedules()])

    def _contexts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        unmanaged = {"managed_gradient_accumulation": False}
        contexts = ("no_sync", "coalesce_grad_reduction")
        for outer in contexts:
            for inner in contexts:
                yield f"{inner} inside {outer}", lambda o=outer, i=inner: self._nest(o, i)
            yield f"step inside {outer}", lambda o=outer: self._step_in(o)
        yield "no_sync at stage 2", lambda: self._enter(self.engine(2).no_sync())
        at_stage_0 = lambda: self._enter(self.engine(0).coalesce_grad_reduction())  # noqa: E731
        yield "coalesce_grad_reduction at stage 0", at_stage_0
        yield (
            "coalesce_grad_reduction, unmanaged",
            lambda: self._enter(self.engine(**unmanaged).coalesce_grad_reduction()),
        )
        yield (
            "set_gradient_accumulation_boundary, unmanaged",
            lambda: self.engine(**unmanaged).set_gradient_accumulation_boundary(True),
        )

    def _steps(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for call in ("backward", "scale"):
            matrix = lambda c=call: getattr(self.engine(), c)(self.engine()(BATCH))  # noqa: E731
            yield f"{call} of a matrix", matrix
            constant = lambda c=call: getattr(self.engine(), c)(torch.ones(()))  # noqa: E731
            yield f"{call} of a constant", constant
            yield f"{call} of a number", lambda c=call: getattr(self.engine(), c)(1.0)
        for call in ("scale", "step"):
            yield f"{call} without an optimizer", lambda c=call: self._without_optimizer(c)
        yield (
            "a batch size that is no multiple",
            lambda: self.engine(train_micro_batch_size_per_gpu=3).set_train_batch_size(25),
        )

    def _others(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        initialize, utils = self._library.initialize, self._library.utils
        yield "initialize without a model", lambda: initialize(config={"train_batch_size": 8})
        for name, sizes in {
            "batch sizes whose product is another": {
                "train_batch_size": 24, "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
            },
            "no batch size": {},
        }.items():  # fmt: skip
            yield name, lambda s=sizes: initialize(model=nn.Linear(4, 4), config=s)
        for folder in (None, ""):
            yield (
                f"save_checkpoint({folder!r})",
                lambda f=folder: self.engine().save_checkpoint(f),
            )
        yield "deepspeed_io of a number", lambda: self.engine().deepspeed_io(5)
        for name in LOCAL.split():
            given = [torch.ones(4, 4)] if "set" in name else []
            given += ["exp_avg"] if "state" in name else []
            yield (
                f"{name} below stage 3",
                lambda n=name, g=given: getattr(utils, n)(self.engine().module.weight, *g),
            )

    def _of_schedules(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        ours = self._schedules
        yield (
            "get_last_lr before the first step",
            lambda: ours.WarmupLR(_adam(), last_batch_iteration=2).get_last_lr(),
        )
        yield "a schedule of no optimizer", lambda: ours.WarmupLR(object())
        for steps in (None, -5, 0, 2.5):
            for name, total in {
                "WarmupLR": {}, "WarmupDecayLR": {"total_num_steps": 9},
                "WarmupCosineLR": {"total_num_steps": 9},
            }.items():  # fmt: skip
                yield (
                    f"{name}, warmup_num_steps={steps}",
                    lambda n=name, t=total, s=steps: getattr(ours, n)(
                        _adam(), **t, warmup_num_steps=s
                    ),
                )
        for size in (0, -5):
            yield (
                f"LRRangeTest, lr_range_test_step_size={size}",
                lambda s=size: ours.LRRangeTest(_adam(), lr_range_test_step_size=s),
            )
        for first, second in ((0, 0), (0, None), (-1, None), (0, 100), (100, -1)):
            yield (
                f"OneCycle of {first} and {second} steps",
                lambda f=first, s=second: ours.OneCycle(
                    _adam(), 0.1, 0.2, cycle_first_step_size=f, cycle_second_step_size=s
                ),
            )
        for name in ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"):
            rates = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} | {name: [0.1, 0.2]}
            yield (
                f"OneCycle, {name} of two for one group",
                lambda r=rates: ours.OneCycle(_adam(), **r),
            )

    def _enter(self, context: Any) -> None:
        with context:
            pass

    def _nest(self, outer: str, inner: str) -> None:
        with getattr(self.engine(), outer)():
            self._enter(getattr(self.engine(), inner)())

    def _step_in(self, context: str) -> None:
        with getattr(self.engine(), context)():
            self.engine().step()

    def _without_optimizer(self, call: str) -> None:
        engine = self.engine(0, optimizer=None)
        loss = engine(BATCH).mean()
        engine.scale(loss) if call == "scale" else engine.step()


def _adam() -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)


def raised(call: Callable[[], Any]) -> type[Exception] | None:
    """The type of what the call raises, None for nothing."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None
