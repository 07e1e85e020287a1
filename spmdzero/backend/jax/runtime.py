"""Devices and processes, as JAX knows them: see `spmdzero.backend.Runtime`."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

import jax
import torch

from spmdzero._torch_xla import torch_xla_is_imported
from spmdzero.backend._device_generator import take_over_generator
from spmdzero.backend._left_variables import noted, take_back
from spmdzero.backend._traced import traced
from spmdzero.backend.chips._chips import has_tpu_chips
from spmdzero.backend.chips._torus import Torus
from spmdzero.backend.hosts._watching import waiting
from spmdzero.backend.jax.axes._slice import devices_by_host, torus_of
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._execute import start as start_values
from spmdzero.backend.jax.host_memory import programs_reach
from spmdzero.backend.jax.hosts import _cluster
from spmdzero.backend.jax.hosts._forked import forks
from spmdzero.backend.jax.lazy._cells import cells, pending_values
from spmdzero.backend.jax.lazy._factories import register
from spmdzero.backend.jax.lazy._generator import generator
from spmdzero.backend.jax.lazy._tensor import DEVICE
from spmdzero.backend.jax.lazy._uploads import Upload
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.plan import MeshSpec

__all__ = ["has_tpu_chips"]


def start() -> None:
    """Readies the devices, also those of other processes; does nothing the second time.

    ``PJRT_DEVICE=CPU`` and ``CPU_NUM_DEVICES``, which give torch_xla virtual CPU devices, give them
    to JAX too, unless its own variables are set or its devices were used before.

    Raises:
        SpmdZeroRuntimeError: torch_xla is imported, whose tensors have the same device name; or
            there are other processes, and JAX's devices were used before.
    """
    _started()


@functools.cache
def _started() -> None:
    _require_without_torch_xla()
    if os.environ.get("PJRT_DEVICE") == "CPU" and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    count = os.environ.get("CPU_NUM_DEVICES")
    if count and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # JAX refuses if its devices were used: then their number is the user's choice.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", int(count))
    with noted():
        _cluster.connect()
        register()
        take_over_generator(lambda: DEVICE)
        # Tensors that exist before an engine makes its own mesh are on all devices.
        DeviceMesh(MeshSpec((("fsdp", jax.device_count()),)))
    take_back()
    forks.watch()


def _require_without_torch_xla() -> None:
    if torch_xla_is_imported():
        clients = [name for name in ("transformers", "accelerate") if name in sys.modules]
        verb = "imports" if len(clients) == 1 else "import"
        who = f" {' and '.join(clients)} {verb} it where it is installed." if clients else ""
        raise SpmdZeroRuntimeError(
            "torch_xla is imported, and its tensors and those of the JAX backend have one name for "
            f"their device.{who} Keep it out of this process: set USE_TORCH_XLA=false before "
            "transformers, accelerate and Lightning are imported (spmdzero.integrations.install() "
            "does so, and `spmdzero run`), and import it nowhere yourself. Or take its backend, "
            '"spmd": {"backend": "torch_xla"}'
        )


def device() -> torch.device:
    """The device of tensors on the mesh."""
    start()
    return DEVICE


def device_count() -> int:
    """Number of devices of all processes."""
    start()
    return jax.device_count()


def local_device_count() -> int:
    """Number of devices that this process drives."""
    start()
    return jax.local_device_count()


def local_devices() -> list[str]:
    """Names of this process's devices, such as ``TPU:0``."""
    return [f"{platform()}:{d.id}" for d in sorted(jax.local_devices(), key=lambda d: d.id)]


def process_count() -> int:
    """Number of processes, one per host."""
    start()
    return jax.process_count()


def process_index() -> int:
    """This process's index among all processes."""
    start()
    return jax.process_index()


def rendezvous() -> str:
    """The `init_method` of torch.distributed by which connected processes find each other."""
    return _cluster.rendezvous()


def platform() -> str:
    """The devices' platform: ``"CPU"``, ``"TPU"``, ..."""
    start()
    return {"gpu": "CUDA"}.get(jax.default_backend(), jax.default_backend().upper())


def sync() -> None:
    """Starts the recorded operations that haven't been started."""
    if not traced.only:
        start_values(pending_values())
        generator.advance()


def wait() -> None:
    """Blocks until the devices have finished all started work."""
    with waiting():
        jax.effects_barrier()
        for value in _computed():
            value.block_until_ready()


def _computed() -> Iterator[jax.Array]:
    for cell in cells():
        value = cell.value
        array = None if isinstance(value, Upload) and value.waits else value.array
        if array is not None and not array.is_deleted():
            yield array


def generator_state() -> int:
    """The state of the devices' own generator, which draws outside of the replica region."""
    generator.advance()
    return generator.state


def seed(value: int) -> None:
    """Seeds the devices' own generator."""
    generator.seed(value)


def program_platform() -> str:
    """The platform for which the current program is traced, as `platform` names it."""
    return traced.platform or platform()


def host_memory() -> bool:
    """Whether a program that is traced now can leave tensors in the host's memory."""
    start()
    if program_platform() != platform():
        return program_platform() == "TPU"
    return programs_reach(compilations.mesh)


def program_torus() -> Torus | None:
    """The torus of the chips for which the current program is traced; None if not known."""
    if traced.torus is not None or platform() != "TPU":
        return traced.torus
    return torus_of(devices_by_host())
