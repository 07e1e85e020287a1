"""The private torch_xla calls, in one place, for the one version that they are known to work in.

Everything here has no public equivalent (manual sharding, optimised HLO) or one that costs
80 times as much (`xs.mark_sharding` rebuilds an OpSharding at each call).
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.xla._environment import environment_variable

TESTED_VERSION = "2.9.0"

if torch_xla.__version__.split("+")[0] != TESTED_VERSION:
    raise SpmdZeroRuntimeError(
        f"torch_xla {torch_xla.__version__} is installed, spmdzero is built on the private calls "
        f"of {TESTED_VERSION}. Install it: pip install torch=={TESTED_VERSION} "
        f"torch_xla=={TESTED_VERSION}"
    )

_C = torch_xla._XLAC

OpSharding = _C.OpSharding
_BUFFER_IDS = re.compile(r"TensorID: (\d+)\s+AliasID: (\d+)")
MANUAL = OpSharding([], [], [], xs.ShardingType.MANUAL)


def spmd_is_locked() -> bool:
    """Whether a device was already used, so that SPMD can no longer be switched on or off."""
    return _C._xla_get_spmd_config_is_locked()


def mark_sharding(tensor: torch.Tensor, op_sharding: OpSharding) -> None:
    """Annotates `tensor` in place."""
    _C._xla_mark_sharding(tensor, op_sharding)


def sharding_of(tensor: torch.Tensor) -> str:
    """The annotation as HLO writes it, ``''`` where there is none."""
    return _C._get_xla_sharding_spec(tensor)


def local_slices(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """The part of an annotated tensor that each local device holds, padding left out.

    In the order of `local_devices`; nothing is read from the devices.
    """
    whole = tuple(slice(0, length) for length in tensor.shape)
    found = _C._get_local_shard_replica_and_indices([tensor])[0]
    return [
        whole if parts is Ellipsis else tuple(slice(part.start, part.stop) for part in parts)
        for _, parts in found
    ]


def local_shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of `local_slices`."""
    return [tuple(part.stop - part.start for part in parts) for parts in local_slices(tensor)]


def local_replicas(tensor: torch.Tensor) -> list[int]:
    """For each local device, how many devices before it hold the same part of `tensor`."""
    return [replica for replica, _ in _C._get_local_shard_replica_and_indices([tensor])[0]]


def is_split(tensor: torch.Tensor) -> bool:
    """Whether an annotated tensor may be different on each device."""
    return _C._get_xla_sharding_type(tensor) not in (
        xs.ShardingType.REPLICATED,
        xs.ShardingType.MAXIMAL,
        None,
    )


def overwrite(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Puts CPU tensors in the place of what each local device holds of a split tensor.

    It stays the tensor it was: with another id, the next step would be another program.
    """
    _C._load_local_shards(tensor, list(parts), local_devices())


def local_devices() -> list[str]:
    """Names of the devices that this process drives, such as ``TPU:0``."""
    return _C._xla_get_runtime_devices()


def full_to_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Enters manual sharding: this device's shard of an annotated global tensor."""
    return _C._spmd_full_to_shard_shape(tensor)


def shard_to_full(
    tensor: torch.Tensor, op_sharding: OpSharding, shape: Sequence[int]
) -> torch.Tensor:
    """Leaves manual sharding: the global tensor of `shape` whose shards are `tensor`."""
    _C._mark_manual_sharding(tensor, MANUAL)
    return _C._spmd_shard_to_full_shape(tensor, op_sharding, torch.Size(shape), tensor.dtype)


def reduce_scatter(
    tensor: torch.Tensor, *, dim: int, count: int, groups: list[list[int]]
) -> torch.Tensor:
    """Sum over each group of devices, split along `dim`; inside manual sharding only."""
    return _C._xla_spmd_reduce_scatter("sum", tensor, 1.0, dim, count, groups)


def all_reduce(tensor: torch.Tensor, *, groups: list[list[int]]) -> torch.Tensor:
    """Sum over each group of devices; inside manual sharding only."""
    return _C._xla_spmd_all_reduce("sum", tensor, 1.0, groups)


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


def _wait_for_inputs() -> None:
    # An input that a running program has yet to write has no handle, and torch_xla's lowering, but
    # for the one before it runs a program, asks for the handle: a segmentation fault.
    _C._xla_wait_device_ops([])


def buffer_ids(tensor: torch.Tensor) -> tuple[int, int]:
    """The id of `tensor`, and the id of the input whose buffer its pending value will reuse.

    Both are the same for a tensor that is not pending, and for one that is not an update in place.
    """
    found = _BUFFER_IDS.search(_C._get_xla_tensor_debug_info(tensor))
    assert found is not None
    return int(found[1]), int(found[2])


def runtime_has_started() -> bool:
    """Whether the client of the devices exists, which reads its flags only once."""
    return _C._xla_runtime_is_initialized()


def start_runtime() -> None:
    """Makes the client of the devices, which reads its flags; a device's first use does too."""
    _C._init_computation_client()


def has_compiled() -> bool:
    """Whether the cache of compiled programs exists: where it keeps them is decided by then."""
    return _C._xla_computation_cache_is_initialized()


def cached_programs() -> int:
    """How many compiled programs torch_xla keeps; makes the cache if there is none yet."""
    return _C._xla_get_num_cached_compilation_graph()


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


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the devices without data: it can be traced, but not marked, run or read."""
    xla_shape = xb.mkshape(xb.Op.from_torch_type(dtype), tuple(shape))
    return _C._xla_create_placeholder_tensor(xla_shape.shape)


def needs_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is pending and can't be computed, because a placeholder has no data."""
    if tensor.device.type != "xla" or not any(are_pending([tensor])):
        return False
    return any_without_data(program_inputs([tensor])[1])


def any_without_data(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these, none of them pending, is a placeholder. Waits for the devices."""
    _wait_for_values(tensors)
    return any(map(_C._is_placecholder, tensors))


def _wait_for_values(tensors: Sequence[torch.Tensor]) -> None:
    # What a program is still to make is a placeholder until then.
    if any(map(_C._is_placecholder, tensors)):
        _C._xla_wait_device_ops([])


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes `tensor` hold what `other` holds, whatever wraps it."""
    _C._replace_xla_tensor(tensor, other)


def set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor`, what is detached from it and its views hold what `value` holds.

    Setting `.data` would leave those others on a buffer that may be gone.
    """
    torch._functionalize_replace(tensor, torch._from_functional_tensor(value))
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def set_pending_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`set_value` of a pending tensor, after which nothing is pending for it.

    What is detached from it would stay pending until it is used.
    """
    if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 1:
        tensor.detach().copy_(value)
    set_value(tensor, value)


def computation(proto: bytes) -> Any:
    """A serialised HLO module as something that can be called inside of programs."""
    return _C._xla_op_computation_from_module_proto("folded", proto)


def program_text(proto: bytes) -> str:
    """A serialised HLO module as text, with the Python line of each operation if it was recorded.

    Lines are recorded while `record_scopes(True)` is in force.
    """
    return _C._xla_computation_text(computation(proto))


def call(computation: Any, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One pending operation: `computation` of `arguments`, which are as many as it takes."""
    return _C._xla_user_computation("xla::folded", list(arguments), computation)


def tensor_id(tensor: torch.Tensor) -> int:
    """The id of `tensor`; another one after most writes to it."""
    return _C._xla_get_tensor_id(tensor)


def latest_tensor_id() -> int:
    """The highest id that a tensor has so far."""
    return tensor_id(torch.empty(0, device="xla"))


def shardings_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """`sharding_of` each, in one call."""
    return _C._get_xla_sharding_specs(list(tensors))


def buffer_handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What tells the buffers of tensors that are not pending apart; shared by those that share.

    Waits for the devices where a program is still to make one of them.
    """
    # A crash otherwise.
    _wait_for_values(tensors)
    return _C._get_tensors_handle(list(tensors))


def program_inputs(roots: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """The buffers that the pending program of `roots` reads, in its own order.

    Returns the id of the tensor that each was first read through, and a tensor over each, which
    stands for the buffer from now on: `sync` no longer knows that it belongs to the tensor that
    it was read through, and would not let a value that is written over that one take it.
    """
    return _C._get_tensors_xla_device_data_node(list(roots))


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


class ProgramLostError(Exception):
    """A compiled program is no longer in torch_xla's cache, which keeps the latest used ones."""


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


def output_ids(roots: Sequence[torch.Tensor]) -> list[str]:
    """One name for each pending value: tensors with the same name are one output of a program."""
    return [_C._unique_id_for_ir_and_data(root) for root in roots]


def are_pending(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor is the result of operations that have not been started."""
    return _C._check_tensor_need_materialization(list(tensors))


def count_pending(device: torch.device) -> int:
    """How many live tensors are."""
    return sum(_C._check_device_tensor_need_materialization(str(device)))


def start_pending(device: torch.device) -> None:
    """Starts what is pending, as `sync` does, but doesn't end a step of the device's generator."""
    _C._xla_sync_live_tensors(str(device), [], wait=False)


def seed_id() -> int:
    """The id under which a program reads the seed of the device's own generator."""
    return _C._get_seed_info_id()


def seed_tensor(device: torch.device) -> torch.Tensor:
    """The seed of the device's own generator, on the device."""
    return _C._get_base_seed_as_tensor(str(device))


def advance_seed(device: torch.device) -> None:
    """Moves the device's own generator on as `sync` does."""
    # What torch's LazyGraphExecutor computes, in 64 bits (lazy_graph_executor.cpp, `MarkStep`).
    seed = (1012031 + _C._xla_get_rng_seed() * 7012063) % 2**64
    _C._xla_set_rng_seed(seed, str(device))


def write_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes whenever `tensor` is written: in place, through a view, or through `.data`."""
    # Writes through .data leave the version alone, and copy_ leaves the id alone.
    return _C._xla_get_tensor_id(tensor), tensor._version


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Operations created inside carry `name` into the compiled program's `op_name`.

    Only while `record_scopes(True)` is in force; otherwise it costs 0.8 µs and leaves nothing.
    """
    pushed = _C.profiler.scope_pusher(name)  # ends when the object dies
    try:
        yield
    finally:
        del pushed


_recorders = 0


def record_scopes(enabled: bool) -> None:
    """Whether operations traced from now on keep their scopes and lines; the hash is the same.

    torch_xla has one switch for the process, which an observer of one engine and the watch over the
    compiling steps of another may want at a time: it is off when each True was taken back.
    """
    global _recorders
    _recorders += 1 if enabled else -1
    _C._set_ir_debug(_recorders > 0)


@contextlib.contextmanager
def without_scopes() -> Iterator[None]:
    """Operations traced inside keep neither, whoever records them."""
    recorded = _C._get_ir_debug()
    _C._set_ir_debug(False)
    try:
        yield
    finally:
        _C._set_ir_debug(recorded)


def is_manual(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not pending belongs to manual sharding: each device has its own."""
    return sharding_of(tensor) == "{manual}"


def compute(tensor: torch.Tensor) -> None:
    """Has a pending tensor computed, as reading it does."""
    if any(are_pending([tensor])):
        _C._xla_sync_multi([tensor], [], True, False)


def watch_text(shown: Callable[[torch.Tensor, Callable[..., str]], str | None]) -> None:
    """Asks `shown` for the text of each tensor on the devices; torch's own where it says None."""
    own_repr, own_format = torch._tensor_str._str, torch.Tensor.__format__

    def text(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        found = None
        if self.device.type == "xla" and tensor_contents is None:
            found = shown(self, own_repr)
        return own_repr(self, tensor_contents=tensor_contents) if found is None else found

    def formatted(self: torch.Tensor, format_spec: str) -> str:
        if self.device.type == "xla" and not format_spec:
            found = shown(self, own_repr)
            if found is not None:
                return found
        return own_format(self, format_spec)

    torch._tensor_str._str = text
    torch.Tensor.__format__ = formatted
