"""What `explain` is at: a bar on a terminal, log lines elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger("spmdzero")

Step = Callable[[str], AbstractContextManager[None]]


@contextlib.contextmanager
def shown(total: int) -> Iterator[Step]:
    """A function that wraps each of `total` pieces of work, which may overlap, by its name."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("explain", total=total)

        @contextlib.contextmanager
        def step(name: str) -> Iterator[None]:
            bar.update(task, description=name)
            start = time.monotonic()
            yield
            bar.advance(task)
            if not console.is_terminal:
                logger.info("explain: %s, %.1f s", name, time.monotonic() - start)

        yield step
