"""Defers reads that transformers and accelerate make at each step until values are logged.

Only this file knows private names of these packages. If a release has renamed one, its value is
read at each step again, and nothing else changes.
"""

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from spmdzero._after_import import after_import
from spmdzero._logging import is_new
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._accelerate import ASKED, refuse_late
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._deferred import DeferredTensor
from spmdzero.integrations._plain_torch import PLAIN
from spmdzero.integrations._replaced import in_place_of
from spmdzero.step._optimizer import ZeroOptimizer

_aten = torch.ops.aten


class SummedLoss(DeferredTensor):
    """A sum of deferred losses that is computed on the CPU, at the first read.

    On the devices it would be a part of the next step's program, which would then differ after each
    log line.

    Args:
        share: called when a loss is added; returns the fraction of the sum so far that replaces the
            loss if it is not finite, or None to add it anyway.
        before_read: called before losses are read.
    """

    _share: Callable[[], float | None]
    _before_read: Callable[[], None]
    _unread: list[tuple[DeferredTensor, float | None]]

    @staticmethod
    def __new__(  # pyrefly: ignore[bad-override]
        cls, share: Callable[[], float | None], before_read: Callable[[], None]
    ) -> Any:
        """Makes an empty sum."""
        return DeferredTensor.__new__(cls, torch.zeros(()), computes=False)

    def __init__(self, share: Callable[[], float | None], before_read: Callable[[], None]) -> None:
        self._share, self._before_read, self._unread = share, before_read, []

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keeps added losses for a later read."""
        if func is _aten.add_.Tensor and isinstance(args[0], cls) and not kwargs:
            total, loss = args
            if isinstance(loss, DeferredTensor) and loss is not total:
                total._unread.append((loss, total._share()))
                return total
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self) -> torch.Tensor:
        """The sum, on the CPU."""
        unread, self._unread = self._unread, []
        if unread:
            self._before_read()
        for loss, share in unread:
            value = loss.read()
            if share is not None and not torch.isfinite(value):
                value = self._value * share
            self._value += value
        return self._value


logger = logging.getLogger("spmdzero")
_PLAIN = (str, int, float, bool, type(None))


class ChangesAtEachStep:
    """Marks the inputs of a forward that must be traced at each step."""


class TrainerReads:
    """Replaces `trainer` inside of steps, and remembers the attributes that they read.

    A replayed step runs no Python. So the plain values that a step reads, such as
    `self.current_epoch`, are added to its inputs: each new value needs a new program. A step that
    reads anything else, such as an optimizer, is traced each time.
    """

    def __init__(self, trainer: Any) -> None:
        vars(self).update(_trainer=trainer, _names=dict[str, None](), _changing=False)

    def now(self) -> dict[str, Any]:
        """The present values of the attributes that steps have read so far."""
        if self._changing:
            return {"": ChangesAtEachStep()}
        return {name: getattr(self._trainer, name) for name in self._names}

    def note_changing(self, what: str) -> None:
        """Makes steps be traced each time, because they read `what`."""
        vars(self)["_changing"] = True
        if is_new(("trainer reads", what)):
            logger.info(
                "training_step runs as Python at each step, which takes longer than to start what "
                "was compiled, because it reads %s",
                what,
            )

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if isinstance(value, _PLAIN):
            self._names[name] = None
        else:
            self.note_changing(f"self.trainer.{name}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self.note_changing(f"self.trainer, to set {name}")
        setattr(self._trainer, name, value)


_LOSS = "_tr_loss"
_HAS_BF16 = "is_torch_bf16_gpu_available"
_only_reads = ContextVar("_only_reads", default=False)
_FULL_EVALUATION = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
# A trainer's attribute with the user's choice to filter non-finite losses, while the trainer's
# arguments say False.
_FILTERS = "_spmdzero_filters"


def defer_reads() -> None:
    """Makes imported clients read losses and norms only when they log them."""
    wrappers = sys.modules.get("accelerate.utils.deepspeed")
    if wrappers is not None:
        _defer_skips(wrappers.DeepSpeedOptimizerWrapper)
        _refuse_idle_step(wrappers.DeepSpeedOptimizerWrapper)
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None and not isinstance(vars(trainer.Trainer).get(_LOSS), _TrainersLoss):
        _defer_trainers_norm(trainer.Trainer)
        _defer_trainers_loss(trainer.Trainer)
        _keep_in_place(trainer.Trainer)


def follow_imports() -> None:
    """Makes transformers accept `bf16=True` without a GPU, report a too early import, and more."""
    after_import("transformers.training_args", _allow_bf16)
    after_import("transformers.integrations.deepspeed", _refuse_without_deepspeed)
    after_import("transformers.trainer", _count_batches_once)
    after_import("transformers.trainer", _tell_of_plain_torch)


def _refuse_without_deepspeed(module: Any) -> None:
    # Without deepspeed the config's base class is `object`; accelerate makes such configs too.
    if getattr(module, "DeepSpeedConfig", None) is object:

        @in_place_of(module.HfDeepSpeedConfig, "__init__")
        def refuse(original: Any, self: Any, *args: Any) -> None:
            refuse_late("transformers")


def _count_batches_once(module: Any) -> None:
    @in_place_of(module.Trainer, "get_sp_size")
    def get_sp_size(original: Any, self: Any) -> int:
        # Each of DeepSpeed's ranks that share rows has a loader, so that there are as many times
        # its batches. Here a process has one loader for all of its devices.
        return 1 if self.is_deepspeed_enabled else original(self)

    @in_place_of(module.Trainer, "get_tp_size")
    def get_tp_size(original: Any, self: Any) -> int:
        # Nor is it one of several processes that share a batch.
        return 1 if self.is_deepspeed_enabled else original(self)


def _tell_of_plain_torch(module: Any) -> None:
    @in_place_of(module.Trainer, "train")
    def train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # Nothing else shows that the devices are idle: recipes of GPUs name no config where
        # several processes would train by torch's DDP.
        if not self.is_deepspeed_enabled and is_new(PLAIN):
            logger.warning(
                "%s trains by plain torch, without spmdzero and its devices: TrainingArguments "
                "name no DeepSpeed config. Name a file, deepspeed=ds_config.json",
                type(self).__name__,
            )
        return original(self, *args, **kwargs)


def _allow_bf16(module: Any) -> None:
    @in_place_of(module.TrainingArguments, "__post_init__")
    def check(original: Any, self: Any) -> None:
        asked = self.deepspeed or os.environ.get(ASKED, "").lower() == "true"
        own = getattr(module, _HAS_BF16, None)
        if not (asked or _only_reads.get()) or own is None:
            # Training without an engine uses the hardware that transformers checks.
            original(self)
            return
        # TPUs have bf16, and XLA's CPU computes it.
        setattr(module, _HAS_BF16, lambda: True)
        try:
            original(self)
        finally:
            setattr(module, _HAS_BF16, own)


@contextlib.contextmanager
def arguments_only_read() -> Iterator[None]:
    """Context in which arguments are made for a look at them: a process that trains makes others.

    Whether it asks for DeepSpeed isn't known yet.
    """
    before = _only_reads.set(True)
    try:
        yield
    finally:
        _only_reads.reset(before)


def _engine_of(accelerator: Any) -> ClientEngine | None:
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    return engine if isinstance(engine, ClientEngine) else None


def _defer_skips(wrapper: Any) -> None:
    original = vars(wrapper).get("step_was_skipped")
    if original is None or isinstance(original, _StepWasSkipped):
        return
    wrapper.step_was_skipped = _StepWasSkipped(original.fget)


def _refuse_idle_step(wrapper: Any) -> None:
    @in_place_of(wrapper, "step")
    def step(original: Any, self: Any) -> Any:
        # This call does nothing, as accelerator.backward has stepped. A gradient that still waits
        # at the end of an accumulation comes from a plain backward, and would train nothing.
        optimizer = getattr(self, "optimizer", None)
        ends = self.gradient_state.sync_gradients
        if ends and isinstance(optimizer, ZeroOptimizer) and optimizer.gradients_wait:
            raise SpmdZeroUsageError(
                "optimizer.step() of accelerate after loss.backward(): under DeepSpeed it does "
                "nothing, accelerator.backward(loss) makes the step. Write that in place of "
                "loss.backward()"
            )
        return original(self)


class _StepWasSkipped(property):
    """Whether a schedule should stand still; False for a step whose skip is not yet read."""

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        optimizer = getattr(wrapper, "optimizer", None)
        # With a loss scale the engine itself reads at each step whether it was skipped.
        if isinstance(optimizer, ZeroOptimizer) and optimizer.scaler is None:
            hold = optimizer.hold
            if hold is not None:
                return hold.stands
        return super().__get__(wrapper, owner)


def _defer_trainers_norm(trainer: Any) -> None:
    @in_place_of(trainer, "_clip_grad_norm")
    def _clip_grad_norm(original: Any, self: Any, model: Any) -> Any:
        # accelerate's own method returns a number, as it promises, and reads the norm for it.
        engine = _engine_of(self.accelerator)
        return original(self, model) if engine is None else engine.deferred_grad_norm()

    @in_place_of(trainer, "_get_grad_norm")
    def _get_grad_norm(original: Any, self: Any, model: Any, grad_norm: Any = None) -> Any:
        # The logging code takes a tensor as well as a number.
        engine = _engine_of(self.accelerator)
        return original(self, model, grad_norm) if engine is None else engine.deferred_grad_norm()


def _defer_trainers_loss(trainer: Any) -> None:
    if not hasattr(trainer, "training_step"):
        return

    @in_place_of(trainer, "training_step")
    def training_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass's step may call this several times before a loss is added to the sum.
        _tell_of_filter(self)
        loss = original(self, *args, **kwargs)
        # If a trainer runs a step twice, the filter is off already; the call above restored it.
        total = getattr(self, _LOSS, None)
        if isinstance(total, SummedLoss):
            # The trainer's filter would read each loss to check it. The sum checks it later.
            vars(self)[_FILTERS] = self.args.logging_nan_inf_filter
            self.args.logging_nan_inf_filter = False
        return loss

    setattr(trainer, _LOSS, _TrainersLoss())


def _keep_in_place(trainer: Any) -> None:
    @in_place_of(trainer, "evaluation_loop")
    def evaluation_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # The original loop would cast the parameters and move them to the CPU.
        told = self.args
        asked = {name: getattr(told, name, False) for name in _FULL_EVALUATION}
        engine = _engine_of(self.accelerator)
        if engine is None or not any(asked.values()):
            return original(self, *args, **kwargs)
        for name, dtype in _FULL_EVALUATION.items():
            if asked[name] and any(p.dtype != dtype for p in engine.module.parameters()):
                raise SpmdZeroUsageError(
                    f"{name}=True would cast the parameters that the engine trains. Train in that "
                    f"dtype, by {name.partition('_')[0]}=True, or leave it out"
                )
        try:
            vars(told).update(dict.fromkeys(asked, False))
            return original(self, *args, **kwargs)
        finally:
            vars(told).update(asked)


def _tell_of_filter(trainer: Any) -> None:
    """Restores the user's choice in the trainer's arguments."""
    told = vars(trainer)
    if _FILTERS in told and isinstance(told.get(_LOSS), SummedLoss):
        trainer.args.logging_nan_inf_filter = told[_FILTERS]


class _TrainersLoss:
    """`Trainer._tr_loss`, the sum of the losses since the latest log line."""

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        if _LOSS not in vars(trainer):
            raise AttributeError(f"{owner.__name__} has no {_LOSS} before it trains")
        _tell_of_filter(trainer)
        return vars(trainer)[_LOSS]

    def __set__(self, trainer: Any, value: torch.Tensor) -> None:
        if _engine_of(trainer.accelerator) is not None and not isinstance(value, DeferredTensor):
            if trainer.args.auto_find_batch_size:
                raise SpmdZeroUsageError(
                    "auto_find_batch_size=True: Trainer doesn't know XLA's errors of memory, so it "
                    "would never try a smaller batch. Leave it out; `spmdzero explain`, or "
                    "engine.explain, says whether a batch fits"
                )
            told = weakref.ref(trainer)
            value = SummedLoss(
                share=functools.partial(_mean_share, told),
                before_read=functools.partial(_settle_skips, told),
            )
        vars(trainer)[_LOSS] = value


def _mean_share(trainer: "weakref.ref[Any]") -> float | None:
    """The fraction of its sum that Trainer adds for a non-finite loss: the mean of those before."""
    of = trainer()
    if of is None or not vars(of).get(_FILTERS):
        return None
    return 1 / (1 + of.state.global_step - of._globalstep_last_logged)


def _settle_skips(trainer: "weakref.ref[Any]") -> None:
    """Reads the number of skipped steps, so that the schedule makes up for them."""
    engine = _engine_of(of.accelerator) if (of := trainer()) is not None else None
    if engine is not None:
        _ = engine.skipped_steps
