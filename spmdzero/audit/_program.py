"""Findings in one compiled program: collectives that serve activations, and that are too wide."""

import re
from collections.abc import Iterator, Mapping, Sequence

from spmdzero.audit._finding import Finding
from spmdzero.hlo._module import Instruction, Module
from spmdzero.hlo._text import parse
from spmdzero.inspect import Collective, CollectiveLedger
from spmdzero.profiling.flops_profiler import module_of

_COLLECTIVE = re.compile(
    r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?$"
)
_LAYOUT = {"copy", "bitcast", "reshape", "transpose", "fusion", "call", "get-tuple-element"}
_LAYOUT |= {"parameter"}
# What may stand between the sum of a gradient and the update, element by element.
_BETWEEN = {"add", "subtract", "multiply", "divide", "convert", "select", "dynamic-slice", "slice"}
_BETWEEN |= {"copy", "bitcast", "reshape", "transpose", "negate", "concatenate", "pad"}
_SERVES_A_GRADIENT = re.compile(r"\bzero\.(?:gradient|update|norm|direction)/")
_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_SHOWN = 4
_MOVED = {"parameter": "values are gathered", "gradient": "gradients are reduced"}
_WIDTHS = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}


def audit_program(
    hlo: str,
    *,
    dtypes: Mapping[str, str],
    where: str,
    communicate: str | None = None,
    outputs: Sequence[str] = (),
    over_slices: bool = False,
) -> list[Finding]:
    """What is wrong with one optimised, partitioned program, compiled for any platform.

    Args:
        hlo: its text, traced while scopes were recorded.
        dtypes: name -> dtype of each live parameter, such as ``"bfloat16"``.
        where: the program's name, for the evidence.
        communicate: the dtype in which the config asks for gradients to be reduced, None for
            the parameter's.
        outputs: as in `CollectiveLedger.from_hlo`.
        over_slices: whether it is compiled for several slices. libtpu splits what crosses them
            into collectives without a name, of which nothing can be said.

    Raises:
        SpmdZeroUsageError: `hlo` is not one HLO module, or carries no op_name metadata.
    """
    module = parse(hlo)
    ledger = CollectiveLedger.of_module(module, outputs=outputs)
    pairs = list(_with_instructions(ledger, module))
    stray = [c for c in _stray(ledger, module) if c.op_name or not over_slices]
    wide = [c for c, i in pairs if _is_wide(c, dtypes) and not _widened_by_the_compiler(module, i)]
    return [*_leaks(stray, where), *_wide(wide, dtypes, where, communicate)]


def stray_collectives(hlo: str, *, outputs: Sequence[str] = ()) -> tuple[Collective, ...]:
    """The collectives of a program that move an activation; the arguments of `audit_program`."""
    module = parse(hlo)
    return tuple(_stray(CollectiveLedger.of_module(module, outputs=outputs), module))


def _stray(ledger: CollectiveLedger, module: Module) -> Iterator[Collective]:
    leaks = set(ledger.activations)
    for collective, instruction in _with_instructions(ledger, module):
        if collective in leaks and not _feeds_a_gradient(module, instruction, set()):
            yield collective


def _with_instructions(
    ledger: CollectiveLedger, module: Module
) -> Iterator[tuple[Collective, Instruction]]:
    # The ledger has the text's order, and one entry for each tensor of a combined collective.
    entries = iter(ledger.collectives)
    for instruction in module.instructions():
        if _COLLECTIVE.match(instruction.opcode):
            for _ in instruction.operands:
                yield next(entries), instruction


def _leaks(leaks: list[Collective], where: str) -> Iterator[Finding]:
    by_subject: dict[str, list[Collective]] = {}
    for leak in leaks:
        by_subject.setdefault(_subject(leak), []).append(leak)
    for subject, members in by_subject.items():
        moved = sum(c.bytes for c in members)
        shown = ", ".join(f"{c.kind} {c.dtype}{list(c.shape)}" for c in members)
        yield Finding(
            name="stray-activation-collective",
            severity="error",
            subject=subject,
            cause="the compiler moves an activation between devices: the operation mixes rows of "
            "the batch, or propagation lost the batch's sharding here, and every device computes "
            "rows of others",
            fix='inside of the model: "spmd": {"forward": "region"}, where each device runs '
            "its own rows, or an operation that keeps the sharding (nn.RMSNorm for a layer norm); "
            "outside: compute the loss in the model's forward",
            evidence=f"{where}: {shown}; {moved:,} bytes per device",
        )


def _subject(leak: Collective) -> str:
    operation = leak.op_name.rsplit("/", 1)[-1].replace("__", "::")
    module = module_of(leak.op_name)
    if module is None:
        return f"{operation} in the backward pass or outside of the model"
    return f"{operation} in {'module ' + module if module else 'the model'}"


def _feeds_a_gradient(module: Module, value: Instruction, seen: set[tuple[str, str]]) -> bool:
    """Whether a sum goes into a gradient element by element.

    With a global forward the compiler sums a gradient inside of the matrix product that makes it,
    before any tag.
    """
    if not seen and not value.opcode.startswith("all-reduce"):
        return False
    key = value.computation, value.name
    if key in seen:
        return False
    seen.add(key)
    users = [use.user for use in module.uses(value) if use.user is not None]
    return any(
        bool(_SERVES_A_GRADIENT.search(user.op_name))
        or (user.opcode in _BETWEEN and _feeds_a_gradient(module, user, seen))
        for user in users
    )


def _is_wide(c: Collective, dtypes: Mapping[str, str]) -> bool:
    narrow = _HLO_NAMES.get(dtypes.get(c.tensor, ""), c.dtype)
    served = c.role in ("parameter", "gradient")
    return served and _WIDTHS.get(c.dtype, 0) > _WIDTHS.get(narrow, 8)


def _wide(
    wide: list[Collective], dtypes: Mapping[str, str], where: str, communicate: str | None
) -> Iterator[Finding]:
    for role, moved in _MOVED.items():
        members = [c for c in wide if c.role == role]
        if not members:
            continue
        first, names = members[0], sorted({c.tensor for c in members})
        narrow = _HLO_NAMES[dtypes[first.tensor]]
        asked = role == "gradient" and communicate is not None
        yield Finding(
            name="wide-dtype",
            severity="warning",
            subject=", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else ""),
            cause=f"{narrow} parameters' {moved} in {first.dtype}, which moves "
            f"{_WIDTHS[first.dtype] // _WIDTHS[narrow]} times the bytes"
            + (f': "communication_data_type" is "{communicate}"' if asked else ""),
            fix='leave "communication_data_type" out'
            if asked
            else "cast to the parameter's dtype before it crosses devices",
            evidence=f"{where}: {len(members)} collectives, such as {first.kind} {first.dtype}"
            f"{list(first.shape)} of {first.tensor}; {sum(c.bytes for c in members):,} bytes "
            "per device",
        )


def _widened_by_the_compiler(module: Module, collective: Instruction) -> bool:
    """Whether XLA's CPU compiler, which has no bf16 collectives, made this one fp32 by itself."""
    if not collective.opcode.startswith("all-gather"):
        return "_promoted" in collective.attributes
    return all(_was_narrow(module, operand, set()) for operand in module.operands(collective))


def _was_narrow(module: Module, value: Instruction, seen: set[tuple[str, str]]) -> bool:
    key = value.computation, value.name
    if key in seen:
        return False
    seen.add(key)
    if value.opcode == "convert":
        return any(
            _WIDTHS.get(source.shapes[0].dtype, 8) < _WIDTHS.get(value.shapes[0].dtype, 0)
            for source in module.sources(value)
        )
    if value.opcode not in _LAYOUT:
        return False
    # Of a fusion or a call, its root; of a layout change, its operand.
    return any(_was_narrow(module, source, seen) for source in module.sources(value)[:1])
