"""What is traced and not run, and for which chips: the same for each backend."""

import contextlib
import dataclasses
from collections.abc import Iterator

from spmdzero.backend.chips._torus import Torus


@dataclasses.dataclass
class Traced:
    """What the contexts below have set.

    Attributes:
        only: whether nothing may be started.
        platform: that programs are traced for, None for that of the devices.
        torus: how its chips are joined, None where nothing was said.
    """

    only: bool = False
    platform: str | None = None
    torus: Torus | None = None


traced = Traced()


@contextlib.contextmanager
def on_torus(torus: Torus | None) -> Iterator[None]:
    """Inside, `program_torus` says `torus`; None leaves it."""
    before, traced.torus = traced.torus, torus or traced.torus
    try:
        yield
    finally:
        traced.torus = before


@contextlib.contextmanager
def tracing_only(*, platform: str | None = None) -> Iterator[None]:
    """Inside, `sync` starts nothing, and models may be on the meta device: see `Placeholders`.

    Args:
        platform: what `program_platform` says inside; None leaves it. The program may hold what
            only that platform can run.
    """
    before = traced.only, traced.platform
    traced.only, traced.platform = True, platform or traced.platform
    try:
        yield
    finally:
        traced.only, traced.platform = before


def is_tracing_only() -> bool:
    """Whether `tracing_only` is in force."""
    return traced.only
