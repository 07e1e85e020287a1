"""Finds the quickest way to train: many by an estimate, some by the compiler."""

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from torch import nn

from spmdzero.errors import SpmdZeroError
from spmdzero.explain import Explanation, StepAhead, Topology, trace_ahead
from spmdzero.plan import sized
from spmdzero.search._asked import Asked
from spmdzero.search._knobs import Candidate
from spmdzero.search._learnt import Seen, predicted
from spmdzero.search._model import Forward
from spmdzero.search._rough import Estimate, Rough

logger = logging.getLogger("spmdzero")

PREFIX = "plan: "
"""What the search's lines of the log begin with."""

# A candidate whose expected peak is nearer to the chip's memory than this is expected not to fit.
_MARGIN = 0.97
# What is expected to take longer than the best by this factor is not compiled: an expected time is
# off by a tenth.
_WORTH = 1.1
# The share of a step that the chip waits for the wire, from which on flags are tried that hide it.
_WORTH_FLAGS = 0.1
# Times that differ by less than this share are about equal.
_EQUAL = 0.02
_AT_ONCE, _LARGE = 2, 8_000_000_000
# What rests in host memory has to be expected to be quicker by this factor: how much of its copies
# is waited for is the least certain.
_ON_HOST = 1.1
# More blocks than this are a loop: libtpu compiles 80 blocks of a Llama as one in 10 minutes, and
# one by one for more than 27, which each start of a training would take too.
_MANY_BLOCKS = 48
# How a block is computed, of which an estimate knows less than of batch and mesh.
_HOW = ("recompute", "scan")
# The search ends after so many rounds of programs that fit and are no quicker than the best.
_PATIENCE = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate as the compiler sees it.

    Attributes:
        candidate: what was compiled.
        seconds: of a step; None if it doesn't fit, or was refused.
        peak: bytes of a device; 0 if it was refused. Where what rests between steps has no room,
            nothing is compiled, and they are these.
        fits: whether the peak is within the chip's memory.
        explanation: of the step; None if it was not compiled.
        refused: why it can't be, "" if it can.
    """

    candidate: Candidate
    seconds: float | None = None
    peak: int = 0
    fits: bool = False
    explanation: Explanation | None = None
    refused: str = ""


@dataclass(kw_only=True)
class Found:
    """The state of a search, finished or not.

    Attributes:
        ways: number of candidates.
        fitting: number of those that fit by the estimate.
        trials: what was compiled, in this order.
        own: the candidate that the user's JSON is; None if the config refuses it.
        stopped: why the search ended.
        notes: what was not tried.
        refused: why a candidate can't be -> the first such candidate.
    """

    ways: int = 0
    fitting: int = 0
    trials: list[Trial] = field(default_factory=list)
    own: Candidate | None = None
    stopped: str = ""
    notes: list[str] = field(default_factory=list)
    refused: Mapping[str, Candidate] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Trial]:
        """All that fits, the quickest first."""
        fitting = [trial for trial in self.trials if trial.fits]
        return sorted(fitting, key=lambda t: (_seconds(t), t.candidate.plainness))


class Funnel:
    """Searches one slice.

    Args:
        model: on the meta device.
        asked: what the user wrote.
        topology: the slice.
        forward: of the model.
        candidates: all ways to train.
        estimate: estimates one of them.
        own: the user's JSON.
        programs: the most programs to compile.
    """

    def __init__(
        self, *, model: nn.Module, asked: Asked, topology: Topology, forward: Forward,
        candidates: list[Candidate], estimate: Estimate, own: Candidate, programs: int,
    ) -> None:  # fmt: skip
        self._model, self._asked, self._topology = model, asked, topology
        self._blocks = forward.blocks
        self._candidates, self._estimate = candidates, estimate
        self._programs, self._spent, self._took = programs, 0, list[float]()
        self._in_vain = 0
        self._rough: dict[Candidate, Rough] = {}
        self._refused: list[Candidate] = []
        self.seen: list[Seen] = []
        """What was compiled beside its estimate."""
        self.found = Found(ways=len(candidates), own=own)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Of a large model one compilation takes gigabytes of this machine's memory.
        self._at_once = 1 if parameters >= _LARGE else _AT_ONCE

    def run(self) -> Found:
        """Searches until the programs are spent, nothing better is expected, or Ctrl-C."""
        try:
            with _only_our_lines():
                self._estimate_all()
                self._compile()
                self._try_flags()
        except KeyboardInterrupt:
            self.found.stopped = "it was interrupted: this is the best so far"
        self.found.refused = self._estimate.refused
        return self.found

    def _estimate_all(self) -> None:
        begin = time.monotonic()
        for candidate in self._candidates:
            rough = self._estimate(candidate)
            if rough is not None:
                self._rough[candidate] = rough
        if self.found.own not in self._rough:
            self.found.own = None
        self.found.fitting = sum(self._expected_to_fit(r) for r in self._rough.values())
        self._say(
            f"{self.found.ways:,} ways to train, of which "
            f"{self.found.fitting:,} fit by the plan's bytes, in {time.monotonic() - begin:.1f} s"
        )

    def _say(self, line: str) -> None:
        logger.info("%s%s: %s", PREFIX, self._topology.name, line)

    def _expected_to_fit(self, rough: Rough) -> bool:
        return rough.states + rough.rest <= _MARGIN * self._topology.chip.hbm_bytes

    def _compile(self) -> None:
        """Compiles in rounds: what a round says decides the next, so that each search is equal."""
        asked: set[Candidate] = set()
        with ThreadPoolExecutor(self._at_once) as pool:
            try:
                while self._in_vain < _PATIENCE * self._at_once:
                    together: list[tuple[_Running, Future[None]]] = []
                    while len(together) < self._at_once:
                        candidate = self._next(asked)
                        if candidate is None:
                            break
                        asked.add(candidate)
                        begun = self._begin(candidate)
                        if begun is not None:
                            together.append((begun, pool.submit(begun.step.compile)))
                    if not together:
                        return
                    self._end_round(together)
                self.found.stopped = "the last programs that fit were no quicker"
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _end_round(self, together: "list[tuple[_Running, Future[None]]]") -> None:
        before = next((_seconds(trial) for trial in self.found.ranked), math.inf)
        made = [self._end(begun, future) for begun, future in together]
        fitting = [_seconds(trial) for trial in made if trial.fits]
        quicker = min(fitting, default=math.inf) < (1 - _EQUAL) * before
        self._in_vain = 0 if quicker else self._in_vain + len(fitting)

    def _next(self, asked: set[Candidate]) -> Candidate | None:
        """The candidate that is expected to be quickest, of those not in `asked`; None to end."""
        if self._spent >= self._programs:
            self.found.stopped = f"{self._programs} programs were looked at (--programs)"
            return None
        own = self.found.own
        if own is not None and own not in asked:
            if self._rough[own].states <= self._topology.chip.hbm_bytes:
                return own
            # What rests between steps is the plan's own sum, and needs no compiler.
            asked.add(own)
            self.found.trials.append(Trial(candidate=own, peak=self._rough[own].states))
        expected = {
            candidate: predicted(candidate, rough, self.seen, refused=self._refused)
            for candidate, rough in self._rough.items()
            if candidate not in asked
        }
        fitting = {c: r for c, r in expected.items() if self._expected_to_fit(r)}
        if not fitting:
            if self.found.ranked or not expected:
                self.found.stopped = "nothing else is expected to fit"
                return None
            # What is nearest to fitting tells whether anything does.
            return min(expected, key=lambda c: expected[c].states + expected[c].rest)
        alone = unshared(fitting, self.seen)
        best = self._chosen({c: r.seconds for c, r in (alone or fitting).items()})
        ranked = self.found.ranked
        if ranked and not alone and fitting[best].seconds > _WORTH * _seconds(ranked[0]):
            self.found.stopped = "no other way is expected to be quicker"
            return None
        return best

    def _chosen(self, seconds: Mapping[Candidate, float]) -> Candidate:
        """The candidate to compile next, of those expected to be about as quick as the quickest.

        It is the plainest; once something is compiled, the plainest of those that tell most: an
        expectation is least certain where a knob has a value that nothing was compiled with.
        """
        expected = {c: taken * (_ON_HOST if c.host else 1.0) for c, taken in seconds.items()}
        loops = {c: taken for c, taken in expected.items() if c.scan}
        if loops and self._blocks.count > _MANY_BLOCKS:
            expected = loops
        equal = (1 + _EQUAL) * min(expected.values())
        near = [candidate for candidate, taken in expected.items() if taken <= equal]
        return min(near, key=lambda c: (-self._news(c), c.plainness, expected[c]))

    def _news(self, candidate: Candidate) -> int:
        """Number of its knobs of `_HOW` whose value nothing had that was tried."""
        if not self.seen:
            return 0
        tried = [trial.candidate for trial in self.found.trials]
        return sum(
            all(getattr(candidate, knob) != getattr(each, knob) for each in tried) for knob in _HOW
        )

    def _begin(self, candidate: Candidate) -> "_Running | None":
        """Traces a candidate; None if it is refused, which is noted."""
        config = self._asked.config_of(candidate.keys(blocks=self._blocks))
        replicas = self._topology.devices // (candidate.sequence * candidate.tensor)
        batch = self._asked.batch_of(candidate.rows * replicas)
        try:
            step = trace_ahead(self._model, config, batch, self._topology)
        except Exception as error:
            # The user's own code runs here, also in ways in which he hasn't run it.
            self._refuse(candidate, error)
            return None
        self._spent += len(step.programs)
        self._say(f"compiling {candidate.words()}")
        return _Running(candidate=candidate, step=step, begin=time.monotonic())

    def _refuse(self, candidate: Candidate, error: Exception) -> Trial:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        trial = Trial(candidate=candidate, refused=said)
        self.found.trials.append(trial)
        self._say(f"{candidate.words()} can't be: {said}")
        self._refused.append(candidate)
        # A model that is refused in any way would else be traced in all of them.
        self._spent += 1
        gc.collect()
        return trial

    def _end(self, running: "_Running", future: "Future[None]") -> Trial:
        try:
            future.result()
            explanation = running.step.explained()
        except (SpmdZeroError, RuntimeError) as error:
            return self._refuse(running.candidate, error)
        verdict = explanation.verdicts[0]
        seconds = explanation.times[0].seconds if explanation.times else None
        trial = Trial(
            candidate=running.candidate, seconds=seconds, peak=verdict.peak,
            fits=verdict.fits is True and seconds is not None, explanation=explanation,
        )  # fmt: skip
        self.found.trials.append(trial)
        self.seen.append(
            Seen(candidate=trial.candidate, rough=self._rough[trial.candidate],
                 seconds=trial.seconds, peak=trial.peak)
        )  # fmt: skip
        self._took.append(time.monotonic() - running.begin)
        gc.collect()
        self._say(f"{self._words(trial)}{self._left()}")
        return trial

    def _words(self, trial: Trial) -> str:
        if not trial.fits:
            return f"{trial.candidate.words()} doesn't fit: {sized(trial.peak)}"
        return (
            f"{1e3 * _seconds(trial):,.2f} ms a step, {sized(trial.peak)}: "
            f"{trial.candidate.words()}; the best so far "
            f"{1e3 * _seconds(self.found.ranked[0]):,.2f} ms"
        )

    def _left(self) -> str:
        left = max(self._programs - self._spent, 0)
        if not left or not self._took:
            return ""
        each = sum(self._took) / len(self._took) / self._at_once
        return f"; at most {left} more programs, about {left * each:,.0f} s"

    def _try_flags(self) -> None:
        """Compiles the best with its generation's flags, where they have something to hide.

        They have the wire run beside compute, and take several times as long to compile.
        """
        best = next(iter(self.found.ranked), None)
        if best is None or best.explanation is None or "spmd.xla_flags" in self._asked.kept:
            return
        taken = best.explanation.times[0]
        flagged = replace(best.candidate, flags="auto")
        share = taken.exposed / taken.seconds
        if share > _WORTH_FLAGS:
            self._rough[flagged] = self._rough[best.candidate]
            begun = self._begin(flagged)
            if begun is not None:
                with ThreadPoolExecutor(1) as pool:
                    self._end(begun, pool.submit(begun.step.compile))
        elif taken.exposed:
            self.found.notes.append(
                f'The chip waits {100 * share:.1f} % of the step for the wire, of which "spmd": '
                '{"xla_flags": "auto"} may hide a part. That was not tried, as it takes several '
                "times as long to compile."
            )


def unshared(expected: Mapping[Candidate, Rough], seen: Sequence[Seen]) -> dict[Candidate, Rough]:
    """The ways in which no devices share a replica, if all that was compiled shares some.

    The estimate knows least of what a tensor or a sequence axis costs: by it a mixture of experts
    was as quick with one, and by the compiler 1.8 times as slow. So one way without is compiled.
    """
    if not seen or any(each.candidate.tensor * each.candidate.sequence == 1 for each in seen):
        return {}
    return {c: rough for c, rough in expected.items() if c.tensor * c.sequence == 1}


def _seconds(trial: Trial) -> float:
    assert trial.seconds is not None
    return trial.seconds


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A candidate that is being compiled."""

    candidate: Candidate
    step: StepAhead
    begin: float


@contextlib.contextmanager
def _only_our_lines() -> Iterator[None]:
    """Context in which the log has the search's lines, and not those of each engine."""

    def ours(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.getMessage().startswith(PREFIX)

    logger.addFilter(ours)
    try:
        yield
    finally:
        logger.removeFilter(ours)
