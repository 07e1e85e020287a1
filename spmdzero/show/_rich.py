"""What draws tables, imported so that a script's `random` draws what it would draw without."""

import random

_before = random.getstate()

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

# rich numbers its default styles by random numbers of the module's generator.
random.setstate(_before)

__all__ = ["Console", "Table", "Text", "box"]
