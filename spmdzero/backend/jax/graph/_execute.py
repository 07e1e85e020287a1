"""Compiling recorded operations, and starting them."""

import dataclasses
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend import _memory_maps as memory_maps
from spmdzero.backend._interrupts import held
from spmdzero.backend._quiet import without_gloos_lines
from spmdzero.backend._traced import is_tracing_only
from spmdzero.backend.hosts._watching import note_joint, note_started, waiting
from spmdzero.backend.jax._versions import lowered_for, wide_numbers
from spmdzero.backend.jax.graph._blame import UnloweredError, blamed
from spmdzero.backend.jax.graph._by_mesh import by_mesh
from spmdzero.backend.jax.graph._disk_cache import KeptPrograms, Ready
from spmdzero.backend.jax.graph._donation import Arranged, arranged
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.graph._graph_function import function_of, marked_spec
from spmdzero.backend.jax.graph._numbers import with_numbers
from spmdzero.backend.jax.graph._options import chosen, of_devices
from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.hosts._apart import apart, as_held, as_known, mesh_of_host
from spmdzero.backend.jax.hosts._forked import forks
from spmdzero.backend.jax.lazy._uploads import put
from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.hlo import between_hosts

# Number of programs that are kept; each holds memory of the compiler's.
_KEPT = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program.

    Attributes:
        compiled: JAX's executable.
        smallest: number of the output with the fewest elements.
        meets: description of the program's exchanges between hosts, empty if there are none.
        numbers: Python's floats, its last input; empty for a program in which they are constants.
        fresh: a list with one item until the program is started.
    """

    compiled: Any
    smallest: int
    meets: str = ""
    numbers: tuple[np.ndarray, ...] = ()
    fresh: list[bool] = dataclasses.field(default_factory=lambda: [True])

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Starts the program, as all hosts do; on the CPU it may have ended when this returns."""
        if self.meets:
            note_joint(self.meets, part=True)
        with waiting():
            made = self.run_alone(arrays)
        if made:
            small = made[self.smallest]
            note_started(lambda: not (small.is_deleted() or small.is_ready()))
        return made

    def run_alone(self, arrays: Sequence[Any]) -> list[Any]:
        """Starts the program without other hosts."""
        if self.fresh:
            self.fresh.clear()
            if jax.process_count() > 1 and jax.default_backend() == "cpu":
                # The first run makes groups of devices, for which gloo prints lines in other
                # threads.
                with without_gloos_lines():
                    return jax.block_until_ready(self._started(arrays))
        return self._started(arrays)

    def _started(self, arrays: Sequence[Any]) -> list[Any]:
        # Numbers of the host's are among the arrays.
        with wide_numbers():
            return self.compiled(*arrays, *self.numbers)


def _ready(compiled: Any, *, hosts: int) -> Ready:
    """A compiled program with what its text shows; it runs on devices of `hosts` hosts."""
    text = compiled.as_text()
    aliased = text.split("\n", 1)[0].count("-alias)")
    met = between_hosts(text, hosts=hosts) if hosts > 1 else ()
    if not met:
        return Ready(compiled, aliased, "")
    digest = hashlib.sha256("\n".join(met).encode()).hexdigest()[:8]
    return Ready(compiled, aliased, f"a program with {len(met)} exchanges of hosts ({digest})")


class Compilations:
    """The programs that this process has compiled.

    Attributes:
        count, seconds: number of compiled programs, and the time that they took.
        lowered, loaded: number of programs that JAX lowered, and that were read from `folder`.
        aliased: number of inputs whose memory the latest program gives to outputs.
        mesh: of the engine that was made last: over which programs without a mesh of their own run.
        meshes: of all engines that were made.
        folder: programs that other processes compiled, None for none.
    """

    def __init__(self) -> None:
        self.count, self.seconds, self.aliased = 0, 0.0, 0
        self.lowered = self.loaded = 0
        self.mesh: Any = None
        self.meshes = set[Any]()
        self.folder: KeptPrograms | None = None
        self._kept: OrderedDict[Any, Executable] = OrderedDict()
        # Keys of programs compiled with Python's floats as constants; the floats aren't in the
        # keys.
        self._with_constants: set[Any] = set()

    def grouped(self, roots: list[Value]) -> list[list[Value]]:
        """The pending values of each mesh."""
        return [roots] if len(self.meshes) < 2 else by_mesh(roots, self.mesh)

    def executable(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        *,
        donated: tuple[int, ...],
        shardings: Any,
        mesh: Any = None,
    ) -> Executable:
        """The program of a graph, which is compiled unless it is known.

        Args:
            graph: the operations.
            arrays: its inputs, or their shapes.
            donated: numbers of the inputs that are donated.
            shardings: of each output, None for the compiler's choice.
            mesh: over which it runs; None for that of this object.
        """
        mesh = mesh or self.mesh
        forms = tuple([(array.sharding, array.shape) for array in arrays])
        among = (forms, donated, tuple(shardings), chosen.name)
        if (graph.key, among) in self._kept:
            self._kept.move_to_end((graph.key, among))
            return self._kept[graph.key, among]
        opened, numbers = with_numbers(graph)
        key = (opened.key, among)
        if numbers.size and key in self._with_constants:
            # The same program with other floats was compiled before: they vary, so they become an
            # input.
            if key not in self._kept:
                whole = NamedSharding(mesh, PartitionSpec())
                given = jax.ShapeDtypeStruct(numbers.shape, np.float64, sharding=whole)
                self._compile(key, opened, [*arrays, given], donated, shardings, mesh)
            self._kept.move_to_end(key)
            return dataclasses.replace(self._kept[key], numbers=(numbers,))
        self._with_constants.add(key)
        self._compile((graph.key, among), graph, arrays, donated, shardings, mesh)
        return self._kept[graph.key, among]

    def _compile(
        self,
        key: Any,
        graph: Graph,
        arrays: Sequence[Any],
        donated: tuple[int, ...],
        shardings: Any,
        mesh: Any,
    ) -> None:
        folder, name = self.folder, None
        if folder is not None:
            name = folder.key(graph, arrays, donated=donated, shardings=shardings, mesh=mesh)
        ready = folder.load(name) if folder and name else None
        if ready is not None:
            self.loaded += 1
        else:
            begun = time.perf_counter()
            how = {"donated": donated, "shardings": shardings, "mesh": mesh}
            lowered = self.lower(graph, arrays, **how)
            compiled = lowered.compile(compiler_options=of_devices(mesh))
            self.seconds += time.perf_counter() - begun
            self.count += 1
            ready = _ready(compiled, hosts=_own.hosts_of(mesh))
            if folder and name:
                folder.save(name, ready, inputs=len(arrays), outputs=len(graph.outputs))
        self.aliased = ready.aliased
        sizes = [math.prod(slot.shape) for slot in graph.outputs]
        smallest = min(range(len(sizes)), key=sizes.__getitem__, default=0)
        self._kept[key] = Executable(ready.compiled, smallest, ready.meets)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        self._make_room()

    def _make_room(self) -> None:
        """Lets go of the older half of the programs once three quarters of the maps are taken.

        One that is still needed is compiled again. At the limit the next program's code has no
        place, and XLA aborts the process.
        """
        if memory_maps.are_short():
            for _ in range(len(self._kept) // 2):
                self._kept.popitem(last=False)
            memory_maps.say_room_was_made()

    def lower(
        self,
        graph: Graph,
        arrays: Sequence[Any],
        *,
        donated: tuple[int, ...],
        shardings: Any,
        mesh: Any = None,
        platform: str | None = None,
    ) -> Any:
        """The program, lowered but not compiled.

        Args:
            mesh: see `executable`.
            platform: of devices that need not be here, such as ``"TPU"``; None for the present
                ones.

        Raises:
            SpmdZeroRuntimeError: JAX can't lower it; the error names the operation.
        """
        self.lowered += 1
        function = function_of(graph, mesh or self.mesh, [array.sharding for array in arrays])
        with wide_numbers(), jax.default_matmul_precision("highest"):
            jitted = jax.jit(
                function, donate_argnums=donated, out_shardings=list(shardings), keep_unused=True
            )
            try:
                traced = jitted.trace(*arrays)
                return traced.lower() if platform is None else lowered_for(traced, platform.lower())
            except Exception as error:
                raise blamed(graph, error) from error


compilations = Compilations()


def compiled(ready: Arranged) -> tuple[Executable, list[Any]]:
    """The program of an arranged graph, and the arrays of its inputs, which are sent if they wait.

    Raises:
        SpmdZeroRuntimeError: JAX can't lower an operation.
    """
    put(ready.leaves)
    arrays = [leaf.array for leaf in ready.leaves]
    program = compilations.executable(
        ready.graph, arrays, donated=ready.donated, shardings=ready.shardings, mesh=ready.mesh
    )
    return program, arrays


_starting = threading.RLock()


def start(roots: Sequence[Value], *, donate: bool = True) -> None:
    """Computes values, whose arrays are on the devices from then on.

    Args:
        roots: the values.
        donate: whether inputs that no tensor holds any more are donated. No operation that stays
            pending may need them then.

    Raises:
        SpmdZeroRuntimeError: JAX can't lower an operation, or this process is a fork.
    """
    # If two threads read, a value that one has started isn't pending for the other.
    with _starting:
        _start(roots, donate=donate)


def _start(roots: Sequence[Value], *, donate: bool) -> None:
    unique = {id(root): root for root in roots if root.node is not None}
    if not unique:
        return
    forks.require_none()
    alone = apart(unique.values()) if jax.process_count() > 1 else []
    if alone:
        _start_alone(alone)
    wanted = [root for root in unique.values() if root.node is not None]
    if not wanted:
        return
    groups = compilations.grouped(wanted)
    for values in groups:
        # Operations that stay pending may need what no tensor holds any more: those on tensors
        # without data, and those of the meshes that follow.
        last = values is groups[-1]
        _start_together(values, donate=donate and last and not is_tracing_only())


def _start_together(wanted: Sequence[Value], *, donate: bool) -> None:
    """Computes pending values of one mesh, by one program."""
    ready = arranged(wanted, compilations.mesh, donate=donate)
    wanted = [wanted[place] for place in ready.order]
    try:
        program, arrays = compiled(ready)
    except UnloweredError as error:
        # Asking for these values again raises again; the other values are computed the next time.
        for place in error.outputs:
            wanted[place].failed = True
        raise
    if any(value.space is Space.REPLICA for value in wanted):
        # A read within a forward computes what the forward may keep.
        for value, common in zip(wanted, ready.graph.common(ready.leaves), strict=True):
            value.common = common
    with held():
        for value, array in zip(wanted, program.run(arrays), strict=True):
            value.array, value.node = array, None
        for place in ready.donated:
            ready.leaves[place].array = None


def _start_alone(wanted: Sequence[Value]) -> None:
    """Computes values for which this host needs no other host."""
    mesh = compilations.mesh
    own = mesh_of_host(mesh)
    graph, leaves = Graph.of(wanted)
    arrays = as_held(leaves, mesh)
    program = compilations.executable(
        graph, arrays, donated=(), shardings=marked_spec(graph, own), mesh=own
    )
    made = program.run_alone(arrays)
    for value, array in zip(wanted, made, strict=True):
        value.array, value.node = as_known(value, array, mesh), None
