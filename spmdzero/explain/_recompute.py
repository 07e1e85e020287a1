"""Finds the cheapest way to recompute with which a compiled step fits the devices' memory."""

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend import current, runtime
from spmdzero.backend.hosts import processes
from spmdzero.backend.protocols._region import Policy
from spmdzero.backend.replica._keep_sets import keep_sets
from spmdzero.config import SpmdZeroConfig, load_config
from spmdzero.engine import Engine, StepGraph, inputs_of
from spmdzero.errors import (
    ReplicaRegionError,
    SpmdZeroConfigError,
    SpmdZeroError,
    SpmdZeroUsageError,
)
from spmdzero.explain._aot import CompilerMemory
from spmdzero.explain._chips import Topology
from spmdzero.explain._progress import shown
from spmdzero.explain._targets import compile_on, of_a_step
from spmdzero.explain._trace import Batch
from spmdzero.explain._twin import on_each_torus, on_hollow, on_twin, traced_for_tpu
from spmdzero.explain._without_data import each_program
from spmdzero.plan import sized

_KEY = "spmd.recompute"
# From the cheapest to the dearest. A policy that computes a part of what another does takes less
# time, except on TPUs: by libtpu's cycles "dots" takes longer than "everything", and it keeps more
# (docs/tpu_speed.md).
_ORDER = ("nothing", "dots", "everything")
_ON_HOST = "offload"
_ORDER_ON_TPU = ("nothing", "everything", _ON_HOST)
# On a TPU whose compiler says no time: to write and read what fewer multiplications make takes
# longer than they do.
_LEAST_ON_TPU = 1024
# A set of what is kept whose bytes are reckoned is tried, and the next smaller ones.
_SETS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """A step that was compiled with a policy.

    Attributes:
        policy: a value of ``"spmd": {"recompute": ...}``.
        peak: bytes of a device, by the compiler; on the target that has the least to spare.
        room: bytes of a device there that it may take.
        where: the target's name, "" for this process's devices.
        seconds: of a step on all targets, by the compiler's estimate; None where it has none.
    """

    policy: Policy
    peak: int
    room: int
    where: str = ""
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.peak <= self.room

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {1e3 * self.seconds:,.2f} ms a step"
        return f"{json.dumps(self.policy)} {self.peak:,} bytes{time}"


def fit_recompute(engine: Engine) -> None:
    """Makes an engine with "fit" in its config pick a policy at the first inputs of its training.

    Raises:
        SpmdZeroConfigError: the config names no budget, and nobody knows the devices' memory.
    """
    if not engine.spmd_config.spmd.fits_recompute:
        return
    room, known = _room(engine.spmd_config), weakref.ref(engine)

    def pick(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = known()
        assert found is not None
        _pick(found, args, kwargs, room=room)

    engine._training.on_first_inputs = pick


def with_policy(
    settings: SpmdZeroConfig, model: nn.Module, batch: Batch, topologies: Sequence[Topology]
) -> tuple[SpmdZeroConfig, tuple[str, ...]]:
    """The config with a policy in the place of "fit", and a sentence that says which and why.

    Args:
        settings: any config; one that names its policies is returned as it is.
        model: stays as it is.
        batch: the inputs of one forward; the module returns the loss.
        topologies: on all of which the step is to fit; without any, on this process's devices.

    Raises:
        SpmdZeroConfigError: the step fits with no policy.
    """
    if not settings.spmd.fits_recompute:
        return settings, ()
    order: list[tuple[Policy, ...]]
    if topologies:
        attempt = _on_topologies(settings, model, batch, topologies)
        order = [("nothing",), ("everything", "dots"), (_ON_HOST,)]
    else:
        attempt, order = _on_these_devices(settings, model, batch), _order()
    found, said = _cheapest(order, attempt, settings, model)
    return _changed(settings, found.policy), (said,)


def _pick(engine: Engine, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, room: int) -> None:
    def attempt(policy: Policy) -> Attempt:
        peak = on_twin(engine, lambda twin: _peak(twin, args, kwargs), recompute=policy)
        return Attempt(policy=policy, peak=peak, room=room)

    training = engine._training
    settings = training.spmd_config
    found, said = _cheapest(_order(), attempt, settings, engine.module)
    log_once(said)
    assert training.region is not None
    training.region.recompute(found.policy)
    spmd = settings.spmd.model_copy(update={"recompute": found.policy})
    training.spmd_config = settings.model_copy(update={"spmd": spmd})


def _on_these_devices(
    settings: SpmdZeroConfig, model: nn.Module, batch: Batch
) -> Callable[[Policy], Attempt]:
    room = _room(settings)
    args, kwargs = inputs_of(batch)

    def attempt(policy: Policy) -> Attempt:
        config = _changed(settings, policy).source
        peak = on_hollow(model, config, lambda twin: _peak(twin, args, kwargs))
        return Attempt(policy=policy, peak=peak, room=room)

    return attempt


def _on_topologies(
    settings: SpmdZeroConfig, model: nn.Module, batch: Batch, topologies: Sequence[Topology]
) -> Callable[[Policy], Attempt]:
    budget, stage = settings.spmd.recompute_budget, settings.zero_optimization.stage

    def attempt(policy: Policy) -> Attempt:
        config = _changed(settings, policy).source
        there = on_each_torus(topologies, lambda: traced_for_tpu(model, config, batch))
        programs = {name: step.programs for name, step in there.items()}
        with shown(sum(map(len, programs.values()))) as step:
            targets = compile_on(
                (), topologies, for_tpu=programs, flags=settings.spmd.xla_flags, stage=stage,
                step=step, sharing={},
            )  # fmt: skip
        rooms = [budget or topology.chip.hbm_bytes for topology in topologies]
        sizes = zip(targets, rooms, strict=True)
        tightest, room = max(sizes, key=lambda pair: pair[0].memory.memory.peak / pair[1])
        known = all(target.compiled for target in targets)
        return Attempt(
            policy=policy,
            peak=tightest.memory.memory.peak,
            room=room,
            where=tightest.name,
            seconds=sum(target.time.seconds for target in targets) if known else None,
        )

    return attempt


def _peak(twin: Engine, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of a device that a step takes, as this process's own compiler says."""
    memory = current().device_memory
    assert memory is not None

    def compiled(graph: StepGraph, *_: object) -> CompilerMemory:
        arguments, peak = memory.of_program(list(graph.outputs.values()))
        return CompilerMemory(arguments=arguments, peak=peak)

    return of_a_step(list(each_program(twin, args, kwargs, compiled))).peak


def _room(settings: SpmdZeroConfig) -> int:
    """Bytes of a device that a step may take on this process's devices."""
    if settings.spmd.recompute_budget is not None:
        return settings.spmd.recompute_budget
    memory = current().device_memory
    own = None if memory is None else memory.limit()
    # All hosts have to pick the same.
    limits = [own] if runtime.process_count() == 1 else processes.gather_objects(own)
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits):
        raise SpmdZeroConfigError(
            key=_KEY,
            value=settings.spmd.recompute,
            reason=f"{runtime.platform()} devices have no memory of their own to fill",
            fix='Name a budget of bytes of a device: {"fit": "12GB"}.',
        )
    return min(known)


def _order() -> list[tuple[Policy, ...]]:
    return [(policy,) for policy in (_ORDER_ON_TPU if runtime.platform() == "TPU" else _ORDER)]


def _cheapest(
    order: Iterable[tuple[Policy, ...]],
    attempt: Callable[[Policy], Attempt],
    settings: SpmdZeroConfig,
    model: nn.Module,
) -> tuple[Attempt, str]:
    """The first attempt that fits, with a sentence; of those tried together the quickest.

    Where all of a block has to be computed again, there may be room for what saves most of it.

    Raises:
        SpmdZeroConfigError: none fits.
        SpmdZeroUsageError: the step can't be compiled before it is trained.
    """
    made: list[Attempt] = []
    why = ""
    try:
        for together in order:
            made += [_tried(attempt, policy) for policy in together]
            fitting = [each for each in made if each.fits]
            for everything in [each for each in fitting if each.policy == "everything"]:
                made += _with_more_kept(everything, attempt, model)
                # Without a time the last that fits is the one that computes least.
                fitting = [each for each in reversed(made) if each.fits]
            if fitting:
                found = min(fitting, key=lambda each: each.seconds or 0.0)
                return found, _in_words(found, [each for each in made if each is not found])
    except _NoBlocksError as error:
        why = f"; {error}"
    tried = ", ".join(map(str, made))
    raise SpmdZeroConfigError(
        key=_KEY,
        value=settings.spmd.recompute,
        reason=f"the step doesn't fit {_room_in_words(made[-1])}, however much is computed again: "
        f"{tried}{why}",
        fix=f"Try {', or '.join(_nearest(settings))}.",
    )


def _with_more_kept(
    everything: Attempt, attempt: Callable[[Policy], Attempt], model: nn.Module
) -> list[Attempt]:
    """Attempts that keep more of a block than its input: all that is worth it, or what fits.

    Args:
        everything: of what fits with least.
        attempt: compiles a policy.
        model: any.
    """
    by_time = everything.seconds is not None
    least = _LEAST_ON_TPU if runtime.platform() == "TPU" and not by_time else 0
    made: list[Attempt] = []
    try:
        sets = keep_sets(model, attends=True, least=least)
        try:
            made = [attempt(sets[-1].policy)]
        except ReplicaRegionError:
            # The blocks' attention isn't torch's, or there is none.
            sets = keep_sets(model, attends=False, least=least)
            if not sets:
                return []
            made = [attempt(sets[-1].policy)]
        # Each feature takes as many bytes.
        each = (made[0].peak - everything.peak) / sets[-1].features
        room = everything.room - everything.peak
        smaller = [some for some in sets[:-1] if some.features * each <= room]
        while smaller and len(made) <= _SETS and not made[-1].fits:
            made.append(attempt(smaller.pop().policy))
    except (SpmdZeroError, RuntimeError) as error:
        # What fits is there already.
        log_once(f'"recompute": "fit" keeps no more of blocks: {error}')
    return made


class _NoBlocksError(Exception):
    """The model has no blocks that could run again."""


def _tried(attempt: Callable[[Policy], Attempt], policy: Policy) -> Attempt:
    try:
        return attempt(policy)
    except SpmdZeroConfigError as error:
        if error.key == _KEY:
            raise _NoBlocksError(error.reason) from error
        raise
    except (SpmdZeroError, RuntimeError) as error:
        if policy != "nothing":
            raise
        raise SpmdZeroUsageError(
            '"spmd": {"recompute": "fit"} compiles the step without data before it is trained, for '
            'which the module returns its loss; name a policy otherwise, such as "everything". '
            f"It ended in: {error}"
        ) from error


def _in_words(found: Attempt, others: Sequence[Attempt]) -> str:
    instead = ", ".join(map(str, others))
    return (
        f'"recompute": "fit" is read as {json.dumps(found.policy)}: of a step the compiler says '
        f"{found}, which fit {_room_in_words(found)}" + (f"; {instead}" if instead else "")
    )


def _room_in_words(attempt: Attempt) -> str:
    where = f" of {attempt.where}" if attempt.where else ""
    return f"the {attempt.room:,} bytes ({sized(attempt.room)}) of a device{where}"


def _nearest(settings: SpmdZeroConfig) -> Iterator[str]:
    zero = settings.zero_optimization
    if zero.stage < 3:
        yield '"zero_optimization": {"stage": 3}'
    if zero.offload_optimizer is None:
        yield '"offload_optimizer": {"device": "cpu"} on a TPU'
    if settings.spmd.scan == "off":
        yield '"spmd": {"scan": "on"}'
    yield (
        "fewer rows at a time: a smaller train_micro_batch_size_per_gpu with more "
        "gradient_accumulation_steps"
    )


def _changed(settings: SpmdZeroConfig, policy: Policy) -> SpmdZeroConfig:
    source = settings.source
    return load_config({**source, "spmd": {**source["spmd"], "recompute": policy}})
