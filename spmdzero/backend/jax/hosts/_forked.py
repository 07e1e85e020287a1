"""Forked processes, such as a loader's workers: they have no devices."""

import os

from spmdzero.errors import SpmdZeroRuntimeError


class Forks:
    """Knows whether this process was forked from one whose devices were started."""

    def __init__(self) -> None:
        self._inherited = False

    def watch(self) -> None:
        """Marks each later fork of this process; called when the devices are started."""
        os.register_at_fork(after_in_child=self._inherit)

    def _inherit(self) -> None:
        self._inherited = True

    def require_none(self) -> None:
        """Raises instead of waiting for ever: the threads that compute belong to the parent.

        Raises:
            SpmdZeroRuntimeError: this process is such a fork.
        """
        if self._inherited:
            raise SpmdZeroRuntimeError(
                "this process was forked from one that uses the devices (a DataLoader's worker, "
                "for example), and can't compute on them: keep its tensors on the CPU, or start "
                'it by the method "spawn"'
            )


forks = Forks()
