"""The doctor: checks the machine, and finds what slowed training down."""

from collections.abc import Iterator

from spmdzero.audit._machine import machine_checks
from spmdzero.audit._recompiles import recompilations
from spmdzero.audit._report import Check, Diagnosis
from spmdzero.backend import counters, current, memory_maps, runtime
from spmdzero.engine import Engine
from spmdzero.inspect import measure


def doctor(engine: Engine | None = None) -> Diagnosis:
    """Checks backend, versions, devices, flags and memory; after training, also its slowdowns.

    With an engine it also checks which programs were compiled again and why, the number of values
    read from the devices per step, and operations that ran on the CPU, all from the backend's
    counters since the engine's first forward. It changes nothing, so it may be called during
    training. Without an engine it starts the devices.

    Raises:
        SpmdZeroRuntimeError: a device was used before SPMD was on.
    """
    runtime.start()
    checks = list(machine_checks(engine.spmd_config if engine else None))
    if engine is not None:
        checks.append(Check(name="device memory", status="ok", said=str(measure(engine))))
    if engine is not None and engine.programs.launches:
        checks += _compilations(engine)
        checks.append(_host_reads(engine))
    checks += [*_memory_maps(), *_fallbacks()]
    return Diagnosis(checks=tuple(checks))


def _compilations(engine: Engine) -> Iterator[Check]:
    log = engine.programs
    seconds = {"initial states": log.initial.seconds}
    for compilation in log.compilations:
        seconds.setdefault(compilation.kind, 0.0)
        seconds[compilation.kind] += compilation.seconds
    own = ", ".join(f"{kind} {spent:.1f} s" for kind, spent in seconds.items())
    programs, spent_on_all = counters.compiled()
    yield Check(
        name="compilations",
        status="ok",
        said=f"{programs} programs in {spent_on_all:.1f} s in this "
        f"process; this engine's: {own}; it launched {log.launches}, and "
        f"{log.compiling.steps} of its steps compiled something",
    )
    if log.compiling.said is not None:
        yield Check(
            name="compiling steps",
            status="warning",
            said=f"{log.compiling.steps} of {engine.global_steps} steps compiled: "
            f"{log.compiling.said}",
            fix="each step the same program: see the cause",
        )
    for finding in recompilations(log.compilations):
        yield Check(
            name="recompilation",
            status="warning",
            said=f"{finding.subject}, {finding.evidence}: {finding.cause}",
            fix=finding.fix,
        )


def _memory_maps() -> Iterator[Check]:
    allowed = memory_maps.limit()
    if allowed is None or runtime.platform() != "CPU":
        return
    held = memory_maps.count()
    yield Check.fine_unless(
        held > allowed * 3 // 4,
        "memory maps",
        f"{held:,} of the {allowed:,} that Linux lets a process have (vm.max_map_count), "
        "of which each compiled program takes dozens",
        fix="keep fewer programs: XLA_COMPILATION_CACHE_SIZE=64 before the start",
    )


def _host_reads(engine: Engine) -> Check:
    log, steps = engine.programs, max(engine.global_steps, 1)
    said = f"{log.script_reads / steps:.2g} per step by the script and the model"
    if log.engine_reads:
        said += f", {log.engine_reads / steps:.2g} by the engine"
        said += " (fp16, check_finite, printing, what devices found)"
    return Check.fine_unless(
        log.script_reads >= steps,
        "host reads",
        said,
        fix="each waits for the devices: read every so many steps; `spmdzero.auditing(engine)` "
        "names the lines",
    )


def _fallbacks() -> Iterator[Check]:
    for name, calls in counters.fallbacks().items():
        yield Check(
            name="CPU fallback",
            status="warning",
            said=f"{name} ran on the CPU {calls} times in this process",
            fix=f"{current().name} has no lowering of it: write it with other operations; "
            "`spmdzero.auditing(engine)` names the line",
        )
