"""Shows the progress of `explain`: a bar on a terminal, log lines elsewhere."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

# rich numbers its default styles by random numbers of Python's generator, whose state is restored,
# so that a script's `random` draws the same numbers.
_before = random.getstate()
from rich.console import Console  # noqa: E402
from rich.progress import (  # noqa: E402
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

random.setstate(_before)

from spmdzero.explain._passes import told  # noqa: E402

logger = logging.getLogger("spmdzero")

Step = Callable[[str], AbstractContextManager[None]]


@contextlib.contextmanager
def shown(total: int) -> Iterator[Step]:
    """Yields a context manager for each of `total` pieces of work, which may overlap."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("explain", total=total)

        @contextlib.contextmanager
        def step(name: str) -> Iterator[None]:
            bar.update(task, description=name)
            with contextlib.nullcontext() if console.is_terminal else told(name, logger.info):
                yield
            bar.advance(task)

        yield step
