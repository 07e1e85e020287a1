"""`deepspeed.zero.Init`: a module whose parameters move to the devices while it is built."""

import contextlib
import enum
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from spmdzero._logging import log_once
from spmdzero.backend import arrays, current
from spmdzero.compat.comm import init_distributed
from spmdzero.config import load_config
from spmdzero.engine import start_devices
from spmdzero.state._homes import Homes, bring, place

_ROOM = 64 << 20
"""Bytes of parameters that wait on the host, for what initialises them."""


class DeepSpeedTensorOverride(enum.Enum):
    """The properties of a tensor that DeepSpeed's `Init` changes."""

    dtype = enum.auto()
    device = enum.auto()


class Init(contextlib.AbstractContextManager["Init", None]):
    """Builds a module with the values that it has without it; at stage 3 straight into shards.

    DeepSpeed's signature. Where the config's stage is 3, a parameter moves to the devices as soon
    as others are made, and what computes with it inside of the context does so on the host, on a
    whole copy that moves back. So the host holds a few parameters at a time. It starts the devices
    and the processes' group, and of several hosts takes the first one's values. A parameter that
    the config keeps whole, or of which something keeps a view or a weak reference (nn.LSTM does),
    stays on the host until `initialize`. After the context use `GatheredParameters` to change one.

    Below stage 3, and without a config, which names the mesh, the module is built on the host.
    A config is checked, so that what is refused is refused here and not only by `initialize`. What
    else is given is without meaning: parameters keep the dtype that they are made in.

    Args:
        module: one that is there already, whose parameters move at once.
        config_dict_or_path, config: DeepSpeed's JSON, its path or its dict.
        enabled: False does nothing.

    Raises:
        SpmdZeroConfigError: the config can't be honoured.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: list[DeepSpeedTensorOverride] = [  # noqa: B006 (DeepSpeed's default)
            DeepSpeedTensorOverride.dtype,
            DeepSpeedTensorOverride.device,
        ],
    ) -> None:
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._placing: Placing | None = None
        if not enabled:
            return
        if given is None:
            log_once(
                "zero.Init() without a config builds the module on the host, whole: pass "
                "config_dict_or_path, which says over which devices its parameters are split"
            )
            return
        settings = load_config(given)
        if settings.zero_optimization.stage < 3:
            return
        spec = start_devices(settings, dist_init_required=None)
        # transformers asks torch for its rank while it loads weights into such a model.
        init_distributed(auto_mpi_discovery=False)
        homes = Homes(
            mesh=current().mesh(spec),
            least=settings.spmd.min_shard_elements,
            whole=settings.zero_optimization.stage3_param_persistence_threshold,
        )
        if module is not None:
            for parameter in module.parameters():
                if not arrays.is_mine(parameter) and (home := homes.of(parameter)) is not None:
                    place(parameter, home)
        self._placing = Placing(homes)

    def __enter__(self) -> "Init":
        if self._placing is not None:
            self._placing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._placing is not None:
            self._placing.__exit__(kind, error, trace)


class Placing(TorchFunctionMode):
    """Within it, a parameter that a module registers moves to its shards when others come.

    What computes with one that has moved finds it on the host again, where it stays until others
    come, or for as long as something keeps a view of it.
    """

    _depth = 0

    def __init__(self, homes: Homes) -> None:
        super().__init__()
        self._homes = homes
        # On the host now, the latest last, with what was made of each in the same memory.
        self._held: dict[nn.Parameter, list[weakref.ref[torch.Tensor]]] = {}
        # Memory of several parameters, which each of them would leave by itself.
        self._shared: set[int] = set()
        self._within = self._busy = False

    def __enter__(self) -> "Placing":
        # The outermost one places: transformers enters it for each model within a model.
        self._within = Placing._depth > 0
        Placing._depth += 1
        if not self._within:
            self._hook = register_module_parameter_registration_hook(self._registered)
            super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        Placing._depth -= 1
        if not self._within:
            super().__exit__(exc_type, exc_val, exc_tb)
            self._hook.remove()
            self._release(room=0)
            self._held.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        with self._alone():
            used = [t for t in _tensors((args, kwargs)) if isinstance(t, nn.Parameter)]
            for parameter in used:
                if bring(parameter) is not None or parameter in self._held:
                    self._held[parameter] = self._held.pop(parameter, [])
            # A tensor's class, of which this is a method, was asked for before it was brought.
            if used and func is torch.Tensor.__deepcopy__:
                func = nn.Parameter.__deepcopy__
            made = func(*args, **kwargs)
            # torch makes a parameter of a view by itself, which is seen where it is used.
            self._note_views((args, kwargs, made))
            self._release(room=_ROOM, but=used)
        return made

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or arrays.is_mine(parameter) or parameter in self._held:
            return
        with self._alone():
            # An LSTM and its like keep weak references, which hold a parameter where it is.
            if isinstance(module, nn.RNNBase) or self._homes.of(parameter) is None:
                return
            self._note_views(parameter)
            if _memory(parameter) not in self._shared:
                self._held[parameter] = []
                self._release(room=_ROOM, but=[parameter])

    def _note_views(self, made: Any) -> None:
        for tensor in _tensors(made) if self._held else ():
            owner = self._at(tensor)
            if owner is None or owner is tensor:
                continue
            if isinstance(tensor, nn.Parameter):
                self._shared.add(_memory(tensor))
                del self._held[owner]
            else:
                self._held[owner].append(weakref.ref(tensor))

    def _at(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter on the host in whose memory a tensor is."""
        if arrays.is_mine(tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        memory = _memory(tensor)
        return next((parameter for parameter in self._held if _memory(parameter) == memory), None)

    def _release(self, *, room: int, but: Sequence[nn.Parameter] = ()) -> None:
        """Moves those that came first, until what is left takes no more than `room` bytes."""
        held = sum(parameter.nbytes for parameter in self._held)
        for parameter, views in list(self._held.items()):
            if held <= room:
                return
            if any(parameter is other for other in but):
                continue
            if any(view() is not None for view in views):
                continue
            home = self._homes.of(parameter)
            if home is not None:
                place(parameter, home)
            held -= parameter.nbytes
            del self._held[parameter]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments and results, in whatever lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
