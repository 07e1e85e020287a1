"""`plan_for`: the best way to train a model on a slice, with no TPU at hand."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from spmdzero.backend import choose, runtime
from spmdzero.config import backend_of, load_config, read
from spmdzero.engine._low_precision import require_gain
from spmdzero.errors import SpmdZeroError, SpmdZeroRuntimeError, SpmdZeroUsageError
from spmdzero.explain import (
    Topology,
    hollow,
    keeping_programs,
    require_slice,
    require_tpu_compiler,
    slices_of,
)
from spmdzero.search._asked import Asked, asked_for
from spmdzero.search._funnel import Found, Funnel, Trial
from spmdzero.search._knobs import REASONS, Blocks
from spmdzero.search._learnt import Seen, predicted
from spmdzero.search._model import Forward, seen_forward
from spmdzero.search._result import TrainingPlan, Way
from spmdzero.search._rough import Estimate
from spmdzero.search._space import own_candidate, space
from spmdzero.search._why import funnel_lines, reasons, waits_for

PROGRAMS = 8
"""The most programs that are compiled, if nothing else is asked for."""


def plan_for(
    model: nn.Module,
    config: str | os.PathLike[str] | dict[str, Any],
    batch: Any,
    *,
    tpu: str,
    global_batch: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    programs: int = PROGRAMS,
    cache: str | os.PathLike[str] | None = None,
) -> TrainingPlan:
    """Searches for the JSON with which a model trains fastest on a slice, by the TPU's compiler.

    Every key of `config` is kept, unless it is "auto". Searched are the ZeRO stage, the mesh, the
    rows of a micro-batch, recomputation, loops, the loss without logits, attention's kernel, host
    memory, and the compiler's flags, where the JSON doesn't say. All ways are estimated by the
    plan's bytes and the chip's rates, and the most promising compiled, each time with what the
    compiler has said so far. Ctrl-C ends it with the best so far.

    Args:
        model: a module that returns its loss; only its shapes are read.
        config: path of a DeepSpeed JSON, or its dict.
        batch: the inputs of one forward, of which shapes and dtypes count.
        tpu: a topology such as ``"v5e:2x4"`` of as many devices as this process has; it needs the
            JAX backend and ``jax[tpu]``, but no TPU.
        global_batch: rows of a step on all devices; None for those of the JSON's
            ``train_batch_size``, or else of `batch`.
        tokens: of the whole run, for its time and price.
        price: of a chip for an hour, in any currency.
        programs: the most programs that are compiled; each takes a minute or so.
        cache: a folder that keeps compiled programs for the next search; None for
            ``~/.cache/spmdzero/programs``.

    Raises:
        SpmdZeroUsageError: a topology that is unknown, or has a different number of devices; a
            batch that no mesh divides; a model whose forward doesn't run without values; a number
            that is none.
        SpmdZeroConfigError: the JSON is refused.
        SpmdZeroRuntimeError: libtpu is missing, or no way to train can be traced.
    """
    choose(backend_of(read(config)))
    topology = Topology.parse(tpu)
    _check_numbers(tokens=tokens, price=price, programs=programs)
    require_tpu_compiler()
    here = runtime.device_count()
    if topology.devices != here:
        raise SpmdZeroUsageError(
            f"{topology.name} has {topology.devices} devices and this process {here}. On the "
            f"command line `spmdzero plan ... --tpu {topology.name}` sees to it, or start Python "
            f"with CPU_NUM_DEVICES={topology.devices} PJRT_DEVICE=CPU"
        )
    begin = time.monotonic()
    asked = asked_for(config, batch, global_batch=global_batch)
    require_gain(load_config({**asked.config, "train_batch_size": 1}), [topology.chip.name])
    require_slice(topology)
    bare = hollow(model)
    forward = seen_forward(bare, asked)
    blocks = forward.blocks
    candidates = space(asked, topology, forward=forward)
    estimate = Estimate(asked, bare, forward, topology)
    own = own_candidate(asked, candidates)
    funnel = Funnel(
        model=bare, asked=asked, topology=topology, forward=forward, candidates=candidates,
        estimate=estimate, own=own, programs=programs,
    )  # fmt: skip
    with keeping_programs(Path(cache) if cache is not None else _CACHE):
        found = funnel.run()
    if found.trials and all(trial.refused for trial in found.trials):
        raise SpmdZeroRuntimeError(
            f"none of the ways to train that were tried can be traced for {topology.name}; the "
            f"first, {found.trials[0].candidate.words()}, ended in: {found.trials[0].refused}"
        )
    took = time.monotonic() - begin
    made = _put_together(found, asked, topology, blocks, bare, tokens, price, took)
    if made.best is None:
        larger = _larger(bare, asked, forward, topology, funnel.seen)
        made = replace(made, larger=larger)
    return made


_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmdzero" / "programs"


def _check_numbers(*, tokens: float | None, price: float | None, programs: int) -> None:
    for name, value in (("tokens", tokens), ("price", price)):
        if value is not None and not 0 < value < math.inf:
            raise SpmdZeroUsageError(f"{name}={value}: write a number above 0")
    if programs < 1:
        raise SpmdZeroUsageError(f"programs={programs}: at least one program has to be compiled")


def _put_together(
    found: Found, asked: Asked, topology: Topology, blocks: Blocks, model: nn.Module,
    tokens: float | None, price: float | None, took: float,
) -> TrainingPlan:  # fmt: skip
    counted = asked.rows * asked.tokens
    chips = topology.devices // topology.chip.devices

    def way(trial: Trial) -> Way:
        time = trial.explanation.times[0] if trial.explanation and trial.explanation.times else None
        seconds = trial.seconds
        rate = None if seconds is None else counted / seconds / chips
        per_million = None if rate is None or price is None else price / 3600 / rate * 1e6
        return Way(
            words=trial.candidate.words(),
            keys=asked.keys_of(trial.candidate.keys(blocks=blocks)),
            yours=trial.candidate == found.own,
            seconds=trial.seconds,
            calibrated=None if time is None else time.calibrated,
            peak=trial.peak,
            room=topology.chip.hbm_bytes,
            fits=trial.fits,
            rate=rate,
            mfu=None if time is None else time.mfu,
            hfu=None if time is None else time.hfu,
            waits="" if time is None else waits_for(time),
            per_million=per_million,
            of_run=None if per_million is None or tokens is None else per_million * tokens / 1e6,
            run_seconds=None if tokens is None or seconds is None else tokens / counted * seconds,
            refused=trial.refused,
        )

    ranked = found.ranked
    shown = [*ranked, *(trial for trial in found.trials if not trial.fits)]
    best = ranked[0] if ranked else None
    keys = {} if best is None else asked.keys_of(best.candidate.keys(blocks=blocks))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return TrainingPlan(
        slice=topology.name,
        model=f"{type(model).__name__}, {parameters:,} parameters",
        step=f"{asked.rows:,} rows"
        + (f" of {asked.tokens:,} tokens, {counted:,} a step" if asked.counted == "token" else ""),
        counted=asked.counted,
        ways=tuple(map(way, shown)),
        why=tuple(reasons(found)),
        config={} if best is None else asked.json_of(keys),
        reasons={key: REASONS[key] for key in keys if key not in asked.kept},
        launch=() if best is None else tuple(_launch(topology)),
        explanation=None if best is None else best.explanation,
        funnel=tuple(funnel_lines(found, seconds=took)),
        notes=asked.notes,
    )


def _launch(topology: Topology) -> Iterator[str]:
    train = "spmdzero run train.py --deepspeed_config ds_plan.json"
    if topology.slices > 1:
        yield f"# {topology.slices} slices of {topology.slice_name}: docs/tpu_pods.md"
    if topology.machine:
        yield from _node_pool(topology)
        where = "the host" if topology.hosts == 1 else f"each of {topology.hosts} hosts"
        yield f"{train}   # on {where}"
        return
    name = topology.cloud_name
    kind = f"--accelerator-type={name}" if name else f"--type={topology.chip.name}"
    yield f"gcloud compute tpus tpu-vm create NAME {kind} --version=..."
    if topology.hosts == 1:
        yield f"{train}   # on the slice's host"
    else:
        yield (
            f'gcloud compute tpus tpu-vm ssh NAME --worker=all --command="{train}"   '
            f"# {topology.hosts} hosts"
        )


def _node_pool(topology: Topology) -> Iterator[str]:
    """Yields the commands for a slice of Kubernetes Engine's."""
    shape, where = topology.slice_name.partition(":")[2], ""
    if topology.chip.name == "tpu7x":
        # Its slices of several hosts are placed by a policy of their own, that of one by none.
        if topology.hosts_each > 1:
            where = " --placement-policy=POLICY"
            yield (
                "gcloud compute resource-policies create workload-policy POLICY "
                f"--type=HIGH_THROUGHPUT --accelerator-topology={shape}"
            )
    else:
        where = f" --tpu-topology={shape}"
    yield (
        f"gcloud container node-pools create NAME --cluster=... --machine-type={topology.machine} "
        f"--num-nodes={topology.hosts_each}{where}"
    )


def _larger(
    model: nn.Module, asked: Asked, forward: Forward, topology: Topology, seen: list[Seen]
) -> str:
    """The smallest larger slice of the generation where something is expected to fit, or ""."""
    for slice in slices_of(topology.chip):
        if slice.devices <= topology.devices:
            continue
        try:
            candidates = space(asked, slice, forward=forward)
        except SpmdZeroError:
            continue
        estimate = Estimate(asked, model, forward, slice)
        for candidate in candidates:
            rough = estimate(candidate)
            if rough is None:
                continue
            expected = predicted(candidate, rough, seen)
            if expected.states + expected.rest <= slice.chip.hbm_bytes:
                return slice.name
    return ""
