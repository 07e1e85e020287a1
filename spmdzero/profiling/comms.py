"""The collectives of a step by operation and message size: DeepSpeed's comms logger.

DeepSpeed times each call that it makes. Here the compiler makes the collectives, inside of one
program, so the list comes from that program's ledger and has sizes and counts of messages, but no
times; ``bytes`` is the size of the whole message, as in DeepSpeed's ``log_summary``.
"""

import contextlib
import dataclasses
import logging
import weakref
from collections import Counter

from spmdzero.compat.comm import summarise
from spmdzero.engine import Engine
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.inspect import Collective, StepLedgers, record_ledgers

logger = logging.getLogger("spmdzero")

_OPERATIONS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "send",
}


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Message:
    """One kind of message.

    Attributes:
        operation: DeepSpeed's name, such as ``"reduce_scatter"``.
        dtype: element type as HLO spells it.
        bytes: size of the whole message.
    """

    operation: str
    dtype: str
    bytes: int


_RECORDED: "weakref.WeakKeyDictionary[Engine, StepLedgers]" = weakref.WeakKeyDictionary()


class Recorder:
    """Reads the ledgers of an engine's first step.

    After `set_train_batch_size` the second step with the new count is read again: with more than
    one micro-batch there is one more program.
    """

    def __init__(self, engine: Engine) -> None:
        self._watching = contextlib.ExitStack()
        self._ledgers: StepLedgers | None = self._watching.enter_context(record_ledgers(engine))
        self._micro_batches = 0
        self._name = object()

    def __call__(self, engine: Engine) -> None:
        """Takes note of the end of a step."""
        if self._ledgers is None:
            if engine.gradient_accumulation_steps() != self._micro_batches:
                self._ledgers = self._watching.enter_context(record_ledgers(engine))
            return
        self._watching.close()
        _RECORDED[engine], self._ledgers = self._ledgers, None
        self._micro_batches = engine.gradient_accumulation_steps()
        counts: dict[str, dict[int, int]] = {}
        for message, count in messages(engine).items():
            sizes = counts.setdefault(message.operation, {})
            sizes[message.bytes] = sizes.get(message.bytes, 0) + count
        summarise(self._name, summary(engine), counts)
        if engine.spmd_config.comms_logger.verbose:
            logger.info("%s", summary(engine))


def messages(engine: Engine) -> dict[Message, int]:
    """Kind of message -> number of such messages in one step.

    It has only the operations of ``comms_logger.prof_ops`` unless ``prof_all`` is on.

    Raises:
        SpmdZeroUsageError: ``comms_logger`` is off, or no step is over.
    """
    if engine not in _RECORDED:
        raise SpmdZeroUsageError(
            "no step's collectives were logged: write "
            '"comms_logger": {"enabled": true} into the config, and train one step first'
        )
    settings, ledgers = engine.spmd_config.comms_logger, _RECORDED[engine]
    counts: Counter[Message] = Counter()
    for kind, ledger in ledgers.by_kind.items():
        programs = 1 if kind == "boundary" else engine.gradient_accumulation_steps() - 1
        for collective in ledger.collectives:
            counts[_message(collective)] += programs
    shown = (m for m in sorted(counts) if settings.prof_all or m.operation in settings.prof_ops)
    return {message: counts[message] for message in shown}


def summary(engine: Engine) -> str:
    """`messages(engine)` as a table.

    Raises:
        SpmdZeroUsageError: ``comms_logger`` is off, or no step is over.
    """
    rows = [
        f"{m.operation:<20}{m.dtype:<8}{_size(m.bytes):<16}{count}"
        for m, count in messages(engine).items()
    ]
    return "\n".join([f"{'Comm. Op':<20}{'dtype':<8}{'Message Size':<16}Count per step", *rows])


def _message(collective: Collective) -> Message:
    # XLA's CPU compiler writes a reduce-scatter as an all-reduce and a slice on each device.
    kind = "reduce-scatter" if collective.scattered else collective.kind
    return Message(operation=_OPERATIONS[kind], dtype=collective.dtype, bytes=collective.bytes)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TB"
