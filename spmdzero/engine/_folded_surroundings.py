"""What a forward's Python saw beside its inputs, for a backward pass that runs it again."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from spmdzero.backend import current
from spmdzero.engine._kinds import autocast_dtype
from spmdzero.engine._module_watch import ModuleWatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A module's attributes and modes, and torch's autocast and default dtype, at one forward.

    Attributes:
        module: whose forward it was.
        watch: the module as it was.
        autocast: dtype of `torch.autocast` on the devices, None where it was off.
        default: torch's default dtype.
    """

    module: nn.Module
    watch: ModuleWatch
    autocast: torch.dtype | None
    default: torch.dtype

    @classmethod
    def now(cls, module: nn.Module, watch: ModuleWatch) -> "Surroundings":
        """Those of a forward that is about to run; `watch` has just seen no change."""
        return cls(
            module=module,
            watch=watch,
            autocast=autocast_dtype(),
            default=torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, everything is as it was; afterwards, as it is."""
        default, after = torch.get_default_dtype(), None
        if self.watch.change():
            after = ModuleWatch(self.module, {})
            self.watch.restore()
        torch.set_default_dtype(self.default)
        on = self.autocast is not None
        try:
            with torch.autocast(current().device_type, dtype=self.autocast, enabled=on):
                yield
        finally:
            torch.set_default_dtype(default)
            if after is not None:
                after.restore()
