"""Compiled programs: their names and text, what was compiled, and the compilers' flags."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnnotatedProgram:
    """A program before partitioning and optimisation.

    Attributes:
        module: serialised.
        is_stablehlo: whether it is StableHLO in MLIR's bytecode, annotated for Shardy, which says
            all of its inputs: their shardings, and whose memory an output takes. Otherwise it is
            an HLO module proto, annotated for GSPMD.
        input_shardings: number of an input -> its sharding as HLO writes it, for the inputs whose
            sharding is not in `module`.
    """

    module: bytes
    is_stablehlo: bool = False
    input_shardings: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Placeholders(Protocol):
    """Tensors whose data was taken away, so that programs of them can be traced, but not run."""

    def stand_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes each tensor an input of what is traced from now on, sharded as its value was."""

    def program(self, outputs: Sequence[torch.Tensor]) -> AnnotatedProgram:
        """The program that computes `outputs`."""


class Programs(Protocol):
    """The text of programs, and the names in it."""

    def scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """What is computed inside carries `name` in the compiled program, if it is recorded."""

    def record_scopes(self, enabled: bool, *, by: Any) -> None:
        """Whether `by` wants scopes and Python lines recorded: they are while one who lives does.

        The program stays the same.
        """

    def optimized_hlo(self, tensors: Sequence[torch.Tensor]) -> str:
        """The optimised, partitioned HLO of the program that computes `tensors`."""

    def annotated(self, tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
        """The program that computes `tensors`, as it is handed to the compiler."""

    def returned(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Which of `tensors` these programs of them return, in order."""

    def text(self, tensors: Sequence[torch.Tensor]) -> str:
        """That program as text, with the Python line of each operation if it was recorded.

        Empty where nothing is left to compute.
        """

    def placeholders(self) -> Placeholders:
        """None of a tensor yet."""

    def start_trace(self, folder: str | os.PathLike[str]) -> None:
        """Records what host and devices do, for TensorBoard and Perfetto.

        Raises:
            SpmdZeroUsageError: it is being recorded already.
        """

    def stop_trace(self) -> None:
        """Writes it to ``<folder>/plugins/profile/<time>/``."""


class Counters(Protocol):
    """What this process has done so far."""

    def compiled(self) -> tuple[int, float]:
        """Programs that were compiled, and the seconds that took."""

    def aliased_inputs(self) -> int:
        """Input buffers that the last compiled program reuses for its outputs (donation)."""

    def host_reads(self) -> int:
        """Transfers from the devices to the host; each waits for what computes its value."""

    def fallbacks(self) -> dict[str, int]:
        """Operations that ran on the CPU for want of a lowering, such as ``aten::i0``: calls."""

    def fallback_calls(self, operation: str) -> int:
        """How often one operation, such as ``aten::i0``, did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaFlag:
    """One flag of libtpu's compiler.

    Attributes:
        name: without the leading dashes.
        value: as libtpu reads it.
        effect: what it changes in the compiled program.
        source: where the effect was measured or published.
    """

    name: str
    value: str
    effect: str
    source: str


class Flags(Protocol):
    """What the compilers are started with.

    Attributes:
        FLAG_SETS: named sets of the TPU compiler's flags.
        ALWAYS: what the TPU compiler is handed whatever the set, name -> value.
    """

    FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]]
    ALWAYS: Mapping[str, str]

    def flags_for(self, name: str, *, chip: str | None = None) -> Mapping[str, str]:
        """The TPU compiler's flags of a named set, name -> value.

        Args:
            name: a set's, or ``"auto"``.
            chip: the generation whose set ``"auto"`` is, this machine's by default.

        Raises:
            SpmdZeroUsageError: there is no such set.
        """

    def apply(self, name: str) -> None:
        """Hands a set to the TPU compiler; what the environment says stays.

        Raises:
            SpmdZeroUsageError: there is no such set.
            SpmdZeroRuntimeError: the compiler has started with other flags, and reads them once.
        """

    def in_force(self) -> dict[str, str]:
        """The flags that this process hands to the TPU compiler, name -> value."""

    def cpu_flags(self) -> list[str]:
        """The flags of XLA on the CPU, those of the environment and spmdzero's own."""

    def use_cache(self, path: str) -> None:
        """Keeps compiled programs in the folder `path`; an empty path changes nothing.

        Raises:
            SpmdZeroRuntimeError: something was compiled before, without it.
        """


class MemoryMaps(Protocol):
    """Memory maps of this process: each program that is compiled for the CPU takes some."""

    def limit(self) -> int | None:
        """Memory maps that Linux lets it have; None where there is no such limit."""

    def count(self) -> int:
        """Memory maps in use."""

    def make_room(self) -> int:
        """Lets go of programs when they run out; how many others that compiled."""
