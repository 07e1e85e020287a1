"""Programs: their text, compiling and running them, and calling one inside of another."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch_xla import _XLAC as _C
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from spmdzero.backend.protocols._compiler import ProgramLostError
from spmdzero.backend.torch_xla._environment import environment_variable
from spmdzero.errors import SpmdZeroRuntimeError


def optimized_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The optimised, partitioned HLO of the pending program that computes `tensors`.

    Raises:
        SpmdZeroRuntimeError: torch_xla has decided before that this process dumps programs as
            they are before optimisation, where GSPMD's collectives don't exist yet.
    """
    _wait_for_inputs()
    # torch_xla reads it once, when it first dumps a program. Not set earlier than needed: its
    # while loops dump too, and abort on an optimised program.
    with environment_variable("XLA_DUMP_POST_OPTIMIZATIONS", "1"):
        text = _C._get_xla_tensors_hlo(list(tensors))
    if 'custom_call_target="Sharding"' in text:
        raise SpmdZeroRuntimeError(
            "this process has dumped a program before (a torch_xla while loop does), without "
            "asking for optimised ones, and can't change that. Start it with the environment "
            "variable XLA_DUMP_POST_OPTIMIZATIONS=1, or record ledgers first"
        )
    return text


def annotated_program(
    tensors: Sequence[torch.Tensor], *, inputs: Sequence[torch.Tensor] = ()
) -> tuple[bytes, list[int]]:
    """The pending program that computes `tensors`, as a serialised, unoptimised HLO module proto.

    It carries the shardings of inputs and values as annotations, but for placeholders; donation
    is not in it. Unlike `_get_xla_tensors_hlo_proto` it heeds no environment variable that is
    fixed per process.

    Returns the proto, and of each of `inputs` which input of the program it is, -1 for none.
    """
    _wait_for_inputs()
    context = _C.lowering.LoweringContext("step")
    context.build(list(tensors))
    return context.hlo(), [context.tensor_parameter_id(tensor) for tensor in inputs]


def _wait_for_inputs() -> None:
    # An input that a running program has yet to write has no handle, and torch_xla's lowering, but
    # for the one before it runs a program, asks for the handle: a segmentation fault.
    _C._xla_wait_device_ops([])


def computation(proto: bytes) -> Any:
    """A serialised HLO module as something that can be called inside of programs."""
    return _C._xla_op_computation_from_module_proto("folded", proto)


def program_text(proto: bytes) -> str:
    """A serialised HLO module as text, with the Python line of each operation if it was recorded.

    Lines are recorded while somebody wants them (`record_scopes`).
    """
    return _C._xla_computation_text(computation(proto))


def call(computation: Any, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One pending operation: `computation` of `arguments`, which are as many as it takes."""
    return _C._xla_user_computation("xla::folded", list(arguments), computation)


def donate(tensor: torch.Tensor) -> None:
    """Lets the program that reads the buffer of `tensor` write an output into it."""
    _C._set_buffer_donation(tensor, True)


def compile_pending(roots: Sequence[torch.Tensor]) -> bytes:
    """Compiles the pending program of `roots`, which writes into donated buffers; starts nothing.

    Returns its hash, by which `run_compiled` finds it. `sync` compiles the same operations under
    another hash.
    """
    with alias_with_buffer_donor_config():
        program = _C._get_graph_hash(list(roots))
        _C._xla_warm_up_cache(list(roots), [])
    return program


def run_compiled(program: bytes, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Starts a compiled program on other buffers; returns its outputs, which may be under way.

    Raises:
        ProgramLostError: torch_xla has let go of the program; nothing was started or donated.
    """
    try:
        return _C._run_cached_graph(program, inputs)
    except RuntimeError as error:
        # There is no call that asks for it, and none that keeps a program in the cache.
        if "Failed to get computation by hash" not in str(error):
            raise
        raise ProgramLostError from None


def has_compiled() -> bool:
    """Whether the cache of compiled programs exists: where it keeps them is decided by then."""
    return _C._xla_computation_cache_is_initialized()


def cached_programs() -> int:
    """How many compiled programs torch_xla keeps; makes the cache if there is none yet."""
    return _C._xla_get_num_cached_compilation_graph()


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Operations created inside carry `name` into the compiled program's `op_name`.

    Only while somebody wants that (`record_scopes`); otherwise it costs 0.8 µs and leaves nothing.
    """
    pushed = _C.profiler.scope_pusher(name)  # ends when the object dies
    try:
        yield
    finally:
        del pushed


_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


def record_scopes(enabled: bool, *, by: Any) -> None:
    """Whether `by` wants operations traced from now on to keep their scopes and Python lines.

    They do as long as somebody wants it who lives: who no longer does leaves it to the others. The
    graph hash is the same.
    """
    if enabled:
        _recorders.add(by)
    else:
        _recorders.discard(by)
    _C._set_ir_debug(bool(_recorders))


@contextlib.contextmanager
def without_scopes() -> Iterator[None]:
    """Operations traced inside keep no scopes and lines, whoever records them."""
    recorded = _C._get_ir_debug()
    _C._set_ir_debug(False)
    try:
        yield
    finally:
        _C._set_ir_debug(recorded)
