"""`deepspeed.zero.Init`: moves the parameters of a module to the devices while it is built."""

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
from spmdzero.backend import arrays, current, found
from spmdzero.compat.comm import init_distributed
from spmdzero.config import load_config, read, with_stand_ins
from spmdzero.engine import start_devices
from spmdzero.state._homes import Homes, bring, place

_ROOM = 64 << 20
"""Bytes of parameters that stay on the host for their initialisation."""


class DeepSpeedTensorOverride(enum.Enum):
    """The properties of a tensor that DeepSpeed's `Init` changes."""

    dtype = enum.auto()
    device = enum.auto()


class Init(contextlib.AbstractContextManager["Init", None]):
    """Builds a module with the same values as without it; at stage 3 straight into shards.

    It has DeepSpeed's signature. If the config's stage is 3, a parameter moves to the devices when
    later parameters are made. Inside of the context, operations on it run on the host, on a whole
    copy that moves back. So the host holds only a few parameters at a time. It starts the devices
    and the processes' group, and all of several hosts take the first one's values. A parameter that
    the config keeps whole, or to which there is a view or a weak reference (nn.LSTM makes them),
    stays on the host until `initialize`. After the context, `GatheredParameters` changes
    parameters.

    Below stage 3, and without a config, which names the mesh, the module is built on the host. A
    given config is checked, so that refused keys are refused here and not only by `initialize`; a
    number that is "auto", such as the learning rate, may come later.
    Other arguments have no effect: parameters keep the dtype with which they are made.

    Args:
        module: an existing module, whose parameters move at once.
        config_dict_or_path, config: DeepSpeed's JSON, its path or its dict.
        enabled: whether the context has an effect.

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
        # The Trainer and accelerate fill in "auto" later, before `initialize` asks for the numbers.
        filled, _ = with_stand_ins(read(given))
        settings = load_config(filled)
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
    """Inside the context, a registered parameter moves to its shards when later ones come.

    An operation on a moved parameter finds it on the host again, where it stays until later
    parameters come, or for as long as there is a view of it.
    """

    _depth = 0

    def __init__(self, homes: Homes) -> None:
        super().__init__()
        self._homes = homes
        # Parameters on the host, the latest last, with the views of each.
        self._held: dict[nn.Parameter, list[weakref.ref[torch.Tensor]]] = {}
        # Memory that several parameters share, so that none of them may move.
        self._shared: set[int] = set()
        self._within = self._busy = False

    def __enter__(self) -> "Placing":
        # Only the outermost context places: transformers enters it for each model within a model.
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
            copying = func is torch.Tensor.__deepcopy__
            # The other argument of a copy is a table of all that was copied before.
            used = found(args[:1] if copying else (args, kwargs), nn.Parameter)
            for parameter in used:
                if bring(parameter) is not None or parameter in self._held:
                    self._held[parameter] = self._held.pop(parameter, [])
            # `func` was looked up in the class that the tensor had before it was brought back.
            if used and copying:
                func = nn.Parameter.__deepcopy__
            made = func(*args, **kwargs)
            # torch itself may make a parameter from a view, which is noticed at its use.
            self._note_views((args[:1] if copying else args, kwargs, made))
            self._release(room=_ROOM, but=used)
        return made

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or arrays.is_mine(parameter) or parameter in self._held:
            return
        with self._alone():
            # Modules such as an LSTM keep weak references, which forbid a move.
            if isinstance(module, nn.RNNBase) or self._homes.of(parameter) is None:
                return
            self._note_views(parameter)
            if _memory(parameter) not in self._shared:
                self._held[parameter] = []
                self._release(room=_ROOM, but=[parameter])

    def _note_views(self, made: Any) -> None:
        for tensor in found(made, torch.Tensor) if self._held else ():
            owner = self._at(tensor)
            if owner is None or owner is tensor:
                continue
            if isinstance(tensor, nn.Parameter):
                self._shared.add(_memory(tensor))
                del self._held[owner]
            else:
                self._held[owner].append(weakref.ref(tensor))

    def _at(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter on the host whose memory the tensor shares, or None."""
        if arrays.is_mine(tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        memory = _memory(tensor)
        return next((parameter for parameter in self._held if _memory(parameter) == memory), None)

    def _release(self, *, room: int, but: Sequence[nn.Parameter] = ()) -> None:
        """Moves the oldest parameters, until the others take at most `room` bytes."""
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
