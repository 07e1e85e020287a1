"""Programs: their text, compiling and running them, and calling one inside another."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch_xla import _XLAC as _C
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from spmdzero.backend.torch_xla._environment import environment_variable
from spmdzero.errors import SpmdZeroRuntimeError


def optimized_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The optimised, partitioned HLO of the pending program that computes `tensors`.

    Raises:
        SpmdZeroRuntimeError: torch_xla has decided earlier that this process dumps unoptimised
            programs, which don't have GSPMD's collectives yet.
    """
    _wait_for_inputs()
    # torch_xla reads the variable once, when it first dumps a program. It is set only now, because
    # torch_xla's while loops dump too, and abort on an optimised program.
    with environment_variable("XLA_DUMP_POST_OPTIMIZATIONS", "1"):
        text = _C._get_xla_tensors_hlo(list(tensors))
    if 'custom_call_target="Sharding"' in text:
        raise SpmdZeroRuntimeError(
            "this process has dumped a program before (a torch_xla while loop does), without "
            "asking for optimised ones, and can't change that. Start it with the environment "
            "variable XLA_DUMP_POST_OPTIMIZATIONS=1, or record ledgers first"
        )
    return text


def annotated_program(tensors: Sequence[torch.Tensor]) -> bytes:
    """The pending program that computes `tensors`, as a serialised, unoptimised HLO module proto.

    It has the shardings of inputs and values as annotations, and no donation. Unlike
    `_get_xla_tensors_hlo_proto` it reads no environment variable that is fixed per process.
    """
    _wait_for_inputs()
    context = _C.lowering.LoweringContext("step")
    context.build(list(tensors))
    return context.hlo()


def _wait_for_inputs() -> None:
    # An input that a running program has yet to write has no handle. torch_xla's lowering asks for
    # the handle, except in the lowering that runs the program: a segmentation fault.
    _C._xla_wait_device_ops([])


def program_text(proto: bytes) -> str:
    """A serialised HLO module as text, with the Python line of each operation if it was recorded.

    Lines are recorded while `record_scopes` asks for them.
    """
    return _C._xla_computation_text(_C._xla_op_computation_from_module_proto("step", proto))


def compile_pending(roots: Sequence[torch.Tensor]) -> bytes:
    """Compiles the pending program of `roots`, which writes into donated buffers; starts nothing.

    Returns its hash, by which `run_compiled` finds it. `sync` compiles the same operations under
    another hash.
    """
    with alias_with_buffer_donor_config():
        program = _C._get_graph_hash(list(roots))
        _C._xla_warm_up_cache(list(roots), [])
    return program


def has_compiled() -> bool:
    """Whether the cache of compiled programs exists, so that its place on disk is decided."""
    return _C._xla_computation_cache_is_initialized()


def cached_programs() -> int:
    """Number of compiled programs that torch_xla keeps; creates the cache if there is none yet."""
    return _C._xla_get_num_cached_compilation_graph()


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Context in which operations carry `name` into the compiled program's `op_name`.

    Only while `record_scopes` asks for it; otherwise it costs 0.8 µs and changes nothing.
    """
    pushed = _C.profiler.scope_pusher(name)  # ends when the object dies
    try:
        yield
    finally:
        del pushed


_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


def record_scopes(enabled: bool, *, by: Any) -> None:
    """Asks for later operations to keep scopes and Python lines while `by` lives, or no longer.

    They are kept while any living object asks for it. The hash of a graph stays the same.
    """
    if enabled:
        _recorders.add(by)
    else:
        _recorders.discard(by)
    _C._set_ir_debug(bool(_recorders))
