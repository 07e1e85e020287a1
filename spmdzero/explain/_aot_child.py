"""Compiles one program for a TPU topology; it runs by its path, in a process of its own.

    python -P _aot_child.py REQUEST.json RESULT.json

It imports jax and libtpu and nothing of spmdzero: a failed check in libtpu ends its process, and
the memory of a compilation is freed when the process ends.
"""

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.experimental import topologies


def main(request_path: str, result_path: str) -> None:
    """Reads the request, compiles, writes the result; a failure gives a traceback and status 1."""
    end_with_parent()
    # Python's own handler waits until the compiler returns, which takes minutes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.loads(Path(request_path).read_text())
    try:
        devices = devices_of(request)
    except xla_client.XlaRuntimeError as error:
        Path(result_path).write_text(json.dumps({"refused": str(error)}))
        return
    if not Path(request["module"]).exists():
        Path(result_path).write_text(json.dumps({"known": True}))
        return
    module = without_the_cpus(Path(request["module"]).read_bytes())
    build = options([d.id for d in devices], flags=request["flags"])
    try:
        executable = compiled(devices, module, build)
    except xla_client.XlaRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        Path(result_path).write_text(json.dumps({"exhausted": str(error)}))
        return
    Path(request["hlo"]).write_text(executable.hlo_modules()[0].to_string())
    cost = dict(executable.cost_analysis())
    result = {
        **memory_of(executable.get_compiled_memory_stats()),
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
    }
    Path(result_path).write_text(json.dumps(result))


def end_with_parent() -> None:
    """Has Linux end this process with the one that started it: a program takes minutes and GiBs."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG of prctl(2), which no module of Python has.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def memory_of(stats: Any) -> dict[str, int]:
    """Bytes that a program takes of one device's memory, and of the host's memory for it."""
    # libtpu's peak has inputs and outputs that are on the host, and where temporaries on the host
    # take more than those on the device, these in their place (0.0.21 and 0.0.50.1). The device
    # has at most all of its own at once.
    states = stats.host_argument_size_in_bytes
    states += stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    own = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = stats.peak_memory_in_bytes - states
    if stats.host_temp_size_in_bytes > 0:
        peak = min(peak, own + stats.temp_size_in_bytes)
    return {
        "arguments": stats.argument_size_in_bytes,
        "peak": peak,
        "host_arguments": stats.host_argument_size_in_bytes,
        "host_peak": states + stats.host_temp_size_in_bytes,
    }


def devices_of(request: dict[str, Any]) -> list[Any]:
    """The devices of a request's topology."""
    cores = {"chip_config_name": request["cores"]} if request["cores"] else {}
    topology = topologies.get_topology_desc(
        topology_name=request["topology"], platform="tpu", num_slices=request["slices"], **cores
    )
    # In the order of the backend's mesh, host by host.
    found = sorted(topology.devices, key=lambda device: (device.process_index, device.id))
    assert len(found) == request["devices"], f"{len(found)} devices, not {request['devices']}"
    return found


def compiled(devices: list[Any], module: bytes, build: Any) -> Any:
    """The program of a module for these devices."""
    told = {"executable_devices": xla_client.DeviceList(tuple(devices)), "compile_options": build}
    try:
        return devices[0].client.compile(module, **told)
    except TypeError:
        # A newer JAX takes a parsed module instead of bytecode.
        with mlir.make_ir_context():
            return devices[0].client.compile(ir.Module.parse(module), **told)


def options(device_ids: list[int], *, flags: dict[str, str]) -> Any:
    """The compile options that JAX sets for SPMD: one replica, free shardings."""
    made = xla_client.CompileOptions()
    made.num_replicas, made.num_partitions = 1, len(device_ids)
    build = made.executable_build_options
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, True
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([device_ids]))
    made.env_option_overrides = list(flags.items())
    return made


def without_the_cpus(module: bytes) -> bytes:
    """JAX's StableHLO without the operations that only XLA's CPU compiler needs."""
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        _divide_no_more_by_one(_main_of(parsed))
        return mlir.module_to_bytecode(parsed)


def _main_of(module: ir.Module) -> ir.OpView | ir.Operation:
    return next(
        op
        for op in module.body.operations
        if op.operation.name == "func.func"
        and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )


def _divide_no_more_by_one(main: ir.OpView | ir.Operation) -> None:
    """Undoes `release_whole`: x / ((x == x) | (x != x)) is x; only the CPU compiler needs it."""
    for op in main.regions[0].blocks[0].operations:
        if isinstance(op, hlo.DivOp) and _ways(op.rhs, op.lhs) == {"EQ", "NE"}:
            op.result.replace_all_uses_with(op.lhs)


def _ways(value: ir.Value, number: ir.Value) -> set[str]:
    """The comparisons, ``"EQ"`` or ``"NE"``, of `number` with itself that make `value` true."""
    made = value.owner.opview if isinstance(value.owner, ir.Operation) else None
    if isinstance(made, hlo.ConvertOp):
        return _ways(made.operand, number)
    if isinstance(made, hlo.OrOp):
        return _ways(made.lhs, number) | _ways(made.rhs, number)
    if not isinstance(made, hlo.CompareOp):
        return set()
    direction = hlo.ComparisonDirectionAttr  # type: ignore[missing-attribute]
    way = direction(made.comparison_direction).value
    if _before_casts(made.lhs) == _before_casts(made.rhs) == _before_casts(number):
        return {way}
    # A cast to a truth value is written as != 0.
    return _ways(made.lhs, number) if way == "NE" else set()


def _before_casts(value: ir.Value) -> ir.Value:
    """The value before casts. JAX's backend computes bf16 as fp32, and casts for each use."""
    made = value.owner.opview if isinstance(value.owner, ir.Operation) else None
    return _before_casts(made.operand) if isinstance(made, hlo.ConvertOp) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
