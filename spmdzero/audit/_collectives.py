"""Findings in one compiled program: collectives that move activations, or are too wide."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from spmdzero._names import covered
from spmdzero.audit._report import Finding, first_of
from spmdzero.hlo import Collective, Instruction, Module, operation_of, parse, read_collectives
from spmdzero.inspect import CollectiveLedger
from spmdzero.profiling import module_of

_LAYOUT = {"copy", "bitcast", "reshape", "transpose", "fusion", "call", "get-tuple-element"}
_LAYOUT |= {"parameter"}
# Elementwise operations that may come between the sum of a gradient and the update.
_BETWEEN = {"add", "subtract", "multiply", "divide", "convert", "select", "dynamic-slice", "slice"}
_BETWEEN |= {"copy", "bitcast", "reshape", "transpose", "negate", "concatenate", "pad"}
# The gradient of an embedding that all rows share is added to rows of the embedding's table.
_BETWEEN |= {"scatter", "dynamic-update-slice"}
_SERVES_A_GRADIENT = re.compile(r"\bzero\.(?:gradient|update|norm|direction)/")
_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_MOVED = {"parameter": "values are gathered", "gradient": "gradients are reduced"}
_WIDTHS = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}


class ReadProgram:
    """One optimised, partitioned program, compiled for any platform, and its faults.

    Args:
        hlo: the program's text, traced while scopes were recorded.
        outputs, tensor, sequence: as in `CollectiveLedger.from_hlo`.

    Raises:
        SpmdZeroUsageError: `hlo` is not one HLO module.
    """

    def __init__(
        self, hlo: str, *, outputs: Sequence[str] = (), tensor: int = 1, sequence: int = 1
    ) -> None:
        self._module, self._key = parse(hlo), "communication_data_type"
        if sequence > 1:
            self._key = f"seq_parallel_{self._key}"
        self._pairs = list(
            read_collectives(self._module, outputs=outputs, tensor=tensor, sequence=sequence)
        )
        self.ledger = CollectiveLedger.of(self._module, (c for _, c in self._pairs))

    @cached_property
    def stray(self) -> tuple[Collective, ...]:
        """The collectives that move an activation.

        Raises:
            SpmdZeroUsageError: the text carries no op_name metadata.
        """
        leaks = set(self.ledger.activations)
        return tuple(
            collective
            for instruction, collective in self._pairs
            if collective in leaks and not _feeds_a_gradient(self._module, instruction)
        )

    def findings(
        self,
        *,
        dtypes: Mapping[str, str],
        where: str,
        communicate: str | None,
        over_slices: bool = False,
    ) -> Iterator[Finding]:
        """Yields collectives that move activations, or are wider than the tensors they move.

        Args:
            dtypes: name -> dtype of each live parameter, such as ``"bfloat16"``.
            where: the program's name, for the evidence.
            communicate: the config's dtype for the reduction of gradients, None for the
                parameter's.
            over_slices: whether the program is compiled for several slices. libtpu splits
                collectives across slices into ones without names, whose purpose is unknown.
        """
        yield from _leaks([c for c in self.stray if c.op_name or not over_slices], where)
        yield from _gathers(self.ledger.of_role("tensor"), where)
        yield from _gathered_rows(self.ledger.of_role("sequence"), where)
        wide = [
            collective
            for place, (instruction, collective) in enumerate(self._pairs)
            if _is_wide(collective, dtypes)
            and not _widened_by_the_compiler(self._module, instruction)
            and not (communicate is None and self._is_narrowed_again(place))
        ]
        asked = None if communicate is None else (self._key, communicate)
        yield from _wide(wide, dtypes, where, asked)

    def _is_narrowed_again(self, place: int) -> bool:
        """Whether a sum's result is narrowed before any other use.

        A newer XLA for the CPU leaves sums like this that it has widened itself, without a name.
        """
        instruction = self._pairs[place][0]
        if not instruction.opcode.startswith("all-reduce"):
            return False
        element = sum(other is instruction for other, _ in self._pairs[:place])
        uses = list(self._module.uses(instruction, element))
        return bool(uses) and all(
            use.user is not None and _narrows(self._module, use.user) for use in uses
        )


def _leaks(leaks: Sequence[Collective], where: str) -> Iterator[Finding]:
    return _findings(
        leaks,
        where,
        name="stray-activation-collective",
        severity="error",
        cause="the compiler moves an activation between devices: the operation mixes rows of "
        "the batch, or propagation lost the batch's sharding here, and every device computes "
        "rows of others",
        fix='inside of the model: "spmd": {"forward": "region"}, where each device runs '
        "its own rows, or an operation that keeps the sharding (nn.RMSNorm for a layer norm); "
        "outside: compute the loss in the model's forward",
    )


def _gathers(within: Sequence[Collective], where: str) -> Iterator[Finding]:
    """Lists what devices that share a replica hand each other beside the sums of their parts."""
    return _findings(
        [c for c in within if c.kind != "all-reduce" and not c.is_scalar],
        where,
        name="gathered-over-tensor",
        severity="warning",
        cause="the operation needs whole, or in other parts, what the mesh axis tensor splits, "
        "as where one weight is several in one",
        fix='split other weights, or this one along another dim: "spmd": {"partition": {...}}; '
        '"skip" leaves it whole',
    )


def _gathered_rows(within: Sequence[Collective], where: str) -> Iterator[Finding]:
    """Lists what devices that share rows gather whole: attention gets its rows otherwise."""
    return _findings(
        [c for c in within if c.kind == "all-gather" and not c.is_scalar],
        where,
        name="gathered-over-sequence",
        severity="warning",
        cause="the operation needs whole rows, or the compiler can't divide it by positions, "
        "and each device of the mesh axis sequence then holds them whole",
        fix="attention by torch.nn.functional.scaled_dot_product_attention (transformers: "
        'attn_implementation="sdpa"), and operations that keep dim 1 for positions',
    )


def _findings(collectives: Sequence[Collective], where: str, **words: Any) -> Iterator[Finding]:
    """Yields a finding of these words for each operation that makes some of the collectives."""
    found: dict[str, list[Collective]] = {}
    for collective in collectives:
        found.setdefault(_subject(collective), []).append(collective)
    for subject, members in found.items():
        shown = ", ".join(f"{c.kind} {c.dtype}{list(c.shape)}" for c in members)
        evidence = f"{where}: {shown}; {sum(c.bytes for c in members):,} bytes per device"
        yield Finding(subject=subject, evidence=evidence, **words)


def _subject(leak: Collective) -> str:
    operation = operation_of(leak.op_name)
    module = module_of(leak.op_name)
    if module is None:
        return f"{operation} in the backward pass or outside of the model"
    return f"{operation} in {'module ' + module if module else 'the model'}"


def _feeds_a_gradient(module: Module, value: Instruction) -> bool:
    """Whether a sum becomes part of a gradient through elementwise operations.

    With a global forward the compiler sums a gradient inside of the matrix product that makes it,
    before any tag.
    """
    return value.opcode.startswith("all-reduce") and any(
        use.user is not None and _SERVES_A_GRADIENT.search(use.user.op_name)
        for use in module.readers(value, through=_BETWEEN)
    )


def _is_wide(c: Collective, dtypes: Mapping[str, str]) -> bool:
    narrow = _HLO_NAMES.get(dtypes.get(covered(c.tensor, dtypes) or "", ""), c.dtype)
    served = c.role in ("parameter", "gradient")
    return served and _WIDTHS.get(c.dtype, 0) > _WIDTHS.get(narrow, 8)


def _wide(
    wide: list[Collective],
    dtypes: Mapping[str, str],
    where: str,
    communicate: tuple[str, str] | None,
) -> Iterator[Finding]:
    for role, moved in _MOVED.items():
        members = [c for c in wide if c.role == role]
        if not members:
            continue
        first = members[0]
        name = covered(first.tensor, dtypes)
        assert name is not None
        narrow = _HLO_NAMES[dtypes[name]]
        cause = (
            f"{narrow} parameters' {moved} in {first.dtype}, which moves "
            f"{_WIDTHS[first.dtype] // _WIDTHS[narrow]} times the bytes"
        )
        fix = "cast to the parameter's dtype before it crosses devices"
        if role == "gradient" and communicate is not None:
            key, dtype = communicate
            cause += f': "{key}" is "{dtype}"'
            # Without the key that is fp32 where devices share rows, as in DeepSpeed.
            fix = f'leave "{key}" out' if key[0] == "c" else f'write "{key}": "{narrow}"'
        yield Finding(
            name="wide-dtype",
            severity="warning",
            subject=first_of({c.tensor for c in members}),
            cause=cause,
            fix=fix,
            evidence=f"{where}: {len(members)} collectives, such as {first.kind} {first.dtype}"
            f"{list(first.shape)} of {first.tensor}; {sum(c.bytes for c in members):,} bytes "
            "per device",
        )


def _widened_by_the_compiler(module: Module, collective: Instruction) -> bool:
    """Whether XLA's CPU compiler, which has no bf16 collectives, made this collective fp32."""
    if not collective.opcode.startswith("all-gather"):
        return "_promoted" in collective.attributes
    return all(_was_narrow(module, operand) for operand in module.operands(collective))


def _narrows(module: Module, user: Instruction) -> bool:
    return user.opcode == "convert" and all(
        _width(user) < _width(source) for source in module.sources(user)
    )


def _was_narrow(module: Module, value: Instruction) -> bool:
    # The origin of a fusion or a call is its root, that of a layout change is its operand.
    *_, first = module.origin(value, through=_LAYOUT)
    return first.opcode == "convert" and any(
        _width(source) < _width(first) for source in module.sources(first)
    )


def _width(value: Instruction) -> int:
    """Bytes per element of a floating value."""
    return _WIDTHS.get(value.shapes[0].dtype, 8)
