"""Protocols of compiled programs: their names and text, counters, and the compilers' flags."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spmdzero.backend.forms._work import Work


class Placeholders(Protocol):
    """Tensors without data, from which programs can be traced, but not run."""

    def stand_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes each tensor an input of later traces, sharded as its value was."""

    def program(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """The program that computes `outputs`, before partitioning and optimisation.

        It is StableHLO in MLIR's bytecode, annotated for Shardy. It has its inputs' shardings, and
        says whose memory an output takes.
        """

    def work_outside(self, outputs: Sequence[torch.Tensor]) -> Work:
        """The arithmetic of the program that neither a replica region nor an update has.

        It is of a script's loss, or of another model, forward and backward as they run; of one
        device. What was counted of an earlier program is left out.
        """


class Lowering(Protocol):
    """Gives a compiler the programs that this process's own devices don't run.

    Programs are traced inside of `tracing_only`, without data and for any platform.
    """

    def annotated(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """The program that computes `tensors`, as `Placeholders.program` has it."""

    def placeholders(self) -> Placeholders:
        """A new `Placeholders`, which has no tensors yet."""


class Programs(Protocol):
    """The text of programs, and the names in it."""

    def scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context that names the operations inside `name` in the compiled program, if recorded."""

    def record_scopes(self, enabled: bool, *, by: Any) -> None:
        """Asks for scopes and Python lines to be recorded as long as `by` lives, or no longer.

        The program itself stays the same.
        """

    def optimized_hlo(self, tensors: Sequence[torch.Tensor]) -> str:
        """The optimised, partitioned HLO of the program that computes `tensors`."""

    def returned(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Indices of those of `tensors` that these programs return, in the order of outputs."""

    def text(self, tensors: Sequence[torch.Tensor]) -> str:
        """The text of the program, with the Python line of each operation if it was recorded.

        Empty where nothing is left to compute.
        """

    def start_trace(self, folder: str | os.PathLike[str]) -> None:
        """Records what host and devices do, for TensorBoard and Perfetto.

        Raises:
            SpmdZeroUsageError: a trace is being recorded already.
        """

    def stop_trace(self) -> None:
        """Ends the trace and writes it to ``<folder>/plugins/profile/<time>/``."""


class Counters(Protocol):
    """Counts of the compilations, transfers and fallbacks of this process so far."""

    def compiled(self) -> tuple[int, float]:
        """Number of compiled programs, and the seconds that compiling them took."""

    def aliased_inputs(self) -> int:
        """Number of input buffers that the last compiled program reuses for outputs (donation)."""

    def host_reads(self) -> int:
        """Number of transfers from the devices to the host; each waits for its value."""

    def fallbacks(self) -> dict[str, int]:
        """Calls per operation that ran on the CPU for want of a lowering, such as ``aten::i0``."""

    def fallback_calls(self, operation: str) -> int:
        """Number of calls of one operation, such as ``aten::i0``, that ran on the CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaFlag:
    """One flag of libtpu's compiler.

    Attributes:
        name: of the flag, without the leading dashes.
        value: as libtpu reads it.
        effect: what it changes in the compiled program.
        source: where the effect was measured or published.
    """

    name: str
    value: str
    effect: str
    source: str


class Flags(Protocol):
    """The flags that the compilers are started with.

    Attributes:
        FLAG_SETS: named sets of the TPU compiler's flags.
        ALWAYS: the flags that the TPU compiler gets with any set, name -> value.
        DEBUGGING: the environment's variables that have programs written out as they are traced.
    """

    FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]]
    ALWAYS: Mapping[str, str]
    DEBUGGING: tuple[str, ...]

    def flags_for(self, name: str, *, chip: str | None = None) -> Mapping[str, str]:
        """The TPU compiler's flags of a named set, name -> value.

        Args:
            name: of a set, or ``"auto"``.
            chip: the generation whose set ``"auto"`` takes; that of this machine by default.

        Raises:
            SpmdZeroUsageError: there is no such set.
        """

    def apply(self, name: str) -> None:
        """Hands a set of flags to the TPU compiler; the environment's flags win.

        Raises:
            SpmdZeroUsageError: there is no such set.
            SpmdZeroRuntimeError: the compiler has started with other flags, which it reads once.
        """

    def in_force(self) -> dict[str, str]:
        """The flags that this process hands to the TPU compiler, name -> value."""

    def cpu_flags(self) -> list[str]:
        """The flags of XLA on the CPU, from the environment and from spmdzero."""

    def use_cache(self, path: str) -> None:
        """Keeps compiled programs in the folder `path`; an empty path changes nothing.

        Raises:
            SpmdZeroRuntimeError: a program was compiled before, without the folder.
        """
