"""Devices and processes, as a backend knows them."""

import contextlib
from typing import Protocol

import torch

from spmdzero.backend.chips._torus import Torus


class Runtime(Protocol):
    """Of this process and of all processes, of which each host has one."""

    def start(self) -> None:
        """Readies the devices; does nothing the second time.

        Raises:
            SpmdZeroRuntimeError: they were used before, in a way that rules this out.
        """

    def device(self) -> torch.device:
        """Where tensors live that the mesh holds."""

    def device_count(self) -> int:
        """Devices of all processes."""

    def local_device_count(self) -> int:
        """Devices that this process drives."""

    def local_devices(self) -> list[str]:
        """Their names, such as ``TPU:0``."""

    def process_count(self) -> int:
        """Processes, one per host."""

    def process_index(self) -> int:
        """This process's place among them."""

    def rendezvous(self) -> str:
        """Where connected processes find each other: an `init_method` of torch.distributed."""

    def platform(self) -> str:
        """``"CPU"``, ``"TPU"``, ..."""

    def has_tpu_chips(self) -> bool:
        """Whether this machine has TPU chips, used or not."""

    def sync(self) -> None:
        """Starts what is recorded and hasn't been started."""

    def wait(self) -> None:
        """Blocks until the devices have finished what was started."""

    def generator_state(self) -> int:
        """The state of the devices' own generator, which draws outside of the replica region."""

    def seed(self, value: int) -> None:
        """Sets it."""

    def program_platform(self) -> str:
        """The platform that the program being traced is for, as `platform` names it.

        Ask this where a program differs by platform, never what devices there are: `explain` traces
        programs for TPUs on a CPU.
        """

    def program_torus(self) -> Torus | None:
        """How the chips are joined that the program being traced is for.

        None where nothing tells: on a CPU, and where several slices are joined.
        """

    def on_torus(self, torus: Torus | None) -> contextlib.AbstractContextManager[None]:
        """Inside, `program_torus` says `torus`; None leaves it."""

    def tracing_only(
        self, *, platform: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, `sync` starts nothing, and models may be on the meta device.

        Args:
            platform: what `program_platform` says inside; None leaves it.
        """

    def is_tracing_only(self) -> bool:
        """Whether `tracing_only` is in force."""
