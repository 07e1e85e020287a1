"""State of programs that are traced but not run, and the chips they are for; for both backends."""

import contextlib
import dataclasses
from collections.abc import Iterator

from spmdzero.backend.chips._torus import Torus


@dataclasses.dataclass
class Traced:
    """The settings of the contexts below.

    Attributes:
        only: whether starting programs is forbidden.
        platform: for which programs are traced, None for that of the devices.
        torus: of the platform's chips, None where it wasn't set.
        zeros: whether a read of a value without data gives zeros; it is refused otherwise.
    """

    only: bool = False
    platform: str | None = None
    torus: Torus | None = None
    zeros: bool = False


traced = Traced()


@contextlib.contextmanager
def on_torus(torus: Torus | None) -> Iterator[None]:
    """Context in which `program_torus` returns `torus`; None changes nothing."""
    before, traced.torus = traced.torus, torus or traced.torus
    try:
        yield
    finally:
        traced.torus = before


@contextlib.contextmanager
def tracing_only(*, platform: str | None = None, reads_give_zeros: bool = False) -> Iterator[None]:
    """Context in which `sync` starts nothing, and models may be on the meta device.

    See `Placeholders`.

    Args:
        platform: the result of `program_platform` inside; None changes nothing. The program may
            hold operations that only that platform can run.
        reads_give_zeros: whether a read of a value without data gives zeros, and a log line that
            names its line; it is refused otherwise.
    """
    before = traced.only, traced.platform, traced.zeros
    traced.only, traced.platform = True, platform or traced.platform
    traced.zeros = traced.zeros or reads_give_zeros
    try:
        yield
    finally:
        traced.only, traced.platform, traced.zeros = before


def is_tracing_only() -> bool:
    """Whether the code runs inside `tracing_only`."""
    return traced.only
