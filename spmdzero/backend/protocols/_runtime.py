"""Protocol of a backend's runtime: devices and processes."""

from typing import Protocol

import torch

from spmdzero.backend.chips._torus import Torus


class Runtime(Protocol):
    """Devices of this process and of all processes; each host has one process."""

    def start(self) -> None:
        """Readies the devices; does nothing the second time.

        Raises:
            SpmdZeroRuntimeError: the devices were used before, in a way that rules this out.
        """

    def device(self) -> torch.device:
        """The device of tensors on the mesh."""

    def device_count(self) -> int:
        """Number of devices of all processes."""

    def local_device_count(self) -> int:
        """Number of devices that this process drives."""

    def local_devices(self) -> list[str]:
        """Names of this process's devices, such as ``TPU:0``."""

    def process_count(self) -> int:
        """Number of processes, one per host."""

    def process_index(self) -> int:
        """This process's index among all processes."""

    def rendezvous(self) -> str:
        """The `init_method` of torch.distributed by which connected processes find each other."""

    def platform(self) -> str:
        """The devices' platform: ``"CPU"``, ``"TPU"``, ..."""

    def has_tpu_chips(self) -> bool:
        """Whether this machine has TPU chips, used or not."""

    def sync(self) -> None:
        """Starts the recorded operations that haven't been started."""

    def wait(self) -> None:
        """Blocks until the devices have finished all started work."""

    def generator_state(self) -> int:
        """The state of the devices' own generator, which draws outside of the replica region."""

    def seed(self, value: int) -> None:
        """Seeds the devices' own generator."""

    def program_platform(self) -> str:
        """The platform for which the current program is traced, as `platform` names it.

        Ask this where a program differs by platform, never which devices exist: `explain` traces
        programs for TPUs on a CPU.
        """

    def host_memory(self) -> bool:
        """Whether the programs that are traced now can leave tensors in the host's memory."""

    def program_torus(self) -> Torus | None:
        """The torus of the chips for which the current program is traced.

        None where it is not known: on a CPU, and where several slices are joined.
        """
