"""`PipelineModule`: a model that is a list of layers."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.compat.checkpointing import checkpoint
from spmdzero.compat.pipe._topology import ProcessTopology

Layer = Callable[..., Any]


class PipelineError(Exception):
    """An error of a pipeline, as DeepSpeed names it."""


class LayerSpec:
    """A layer that isn't made yet (DeepSpeed, runtime/pipe/module.py).

    Args:
        typename: its class, a `torch.nn.Module`.
        module_args, module_kwargs: what the class is called with.

    Raises:
        RuntimeError: the class is no module's.
    """

    def __init__(self, typename: type, *module_args: Any, **module_kwargs: Any) -> None:
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs
        if not issubclass(typename, nn.Module):
            raise RuntimeError("LayerSpec only supports torch.nn.Module types.")

    def build(self, log: bool = False) -> nn.Module:
        """Makes the layer; `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args)]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that stands in several places of a pipeline, with one set of weights.

    Args:
        key: layers of one key are one module.
        forward_fn: called with the module and its input, in the place of the module's forward.
        tied_weight_attr: has no effect: all weights of the module are the same.
        typename, module_args, module_kwargs: as for `LayerSpec`.
    """

    def __init__(
        self,
        key: str,
        typename: type,
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = ["weight"],  # noqa: B006 (DeepSpeed's default)
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr
        )


class PipelineModule(nn.Module):
    """Runs layers one after the other; the engine trains them as any module.

    Names of parameters, and the random numbers that layers are made from, are DeepSpeed's. There
    are no stages: every device runs all layers on its rows, and the config's ZeRO stage divides
    what doesn't fit, also 2 and 3, which DeepSpeed's pipelines don't have.

    Args:
        layers: modules, specs, or functions of one argument; each gets what the one before returns.
        num_stages, topology: one of them must be there; it has no other effect.
        loss_fn: called with the last layer's output and the labels; without it that output is the
            loss.
        seed_layers, seed_fn, base_seed: whether, how and from what a seed is set before each layer
            is made. What is random in a forward is as ever.
        partition_method: ``"parameters"``, ``"uniform"`` or ``"type:<name of a class>"``; the first
            makes each layer twice, as DeepSpeed does to count.
        activation_checkpoint_interval: so many layers are computed again together in the backward;
            0 for none.
        activation_checkpoint_func: computes them again.
        checkpointable_layers: names of classes that may be; all layers with parameters by default.
        dynamic_shape: has no effect.

    Raises:
        RuntimeError: neither `num_stages` nor `topology`, or no layer of the named class.
        NotImplementedError: a pipeline among the layers, or an unknown method.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        self.num_stages = topology.get_dim("pipe") if topology is not None else num_stages
        self._topology = topology
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._layer_specs = list(layers)
        self._count(partition_method.lower())
        self.forward_funcs: list[Layer] = []
        self.tied_modules = nn.ModuleDict()
        for index, layer in enumerate(self._layer_specs):
            self.forward_funcs.append(self._made(index, layer))
        if self.num_stages != 1:
            log_once(
                f"a PipelineModule of {self.num_stages} stages: every device runs all its layers, "
                "on its own rows, and the config's ZeRO stage divides what doesn't fit"
            )

    def _count(self, method: str) -> None:
        """Does what of DeepSpeed's counting of layers has an effect: making each of them."""
        if method == "parameters":
            for layer in self._layer_specs:
                if isinstance(layer, LayerSpec):
                    layer.build()
        elif method.startswith("type:"):
            wanted = re.compile(method.split(":")[1], re.IGNORECASE)
            if not any(wanted.search(_name_of(layer)) for layer in self._layer_specs):
                raise RuntimeError(
                    f"Partitioning '{wanted.pattern}' found no valid layers to partition."
                )
        elif method != "uniform":
            raise NotImplementedError(f"Partitioning method {method} not implemented.")

    def _made(self, index: int, layer: Any) -> Layer:
        if self.seed_layers:
            (self.seed_fn or torch.manual_seed)(self.base_seed + index)
        if isinstance(layer, PipelineModule):
            raise NotImplementedError("RECURSIVE BUILD NOT YET IMPLEMENTED")
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            return (
                module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
            )
        made = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(made, nn.Module):
            self.add_module(str(index), made)
        return made

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """The last layer's output, or with labels and a `loss_fn` the loss of it."""
        x, length = forward_input, len(self.forward_funcs)
        step = self.activation_checkpoint_interval or length
        for start in range(0, length, step):
            layers = self.forward_funcs[start : start + step]
            run, given = functools.partial(_run, layers), x if isinstance(x, tuple) else (x,)
            if self.activation_checkpoint_interval and self._is_checkpointable(layers):
                x = self.activation_checkpoint_func(run, *given)
            else:
                x = run(*given)
        return x if labels is None or self.loss_fn is None else self.loss_fn(x, labels)

    def _is_checkpointable(self, layers: list[Layer]) -> bool:
        names = self.checkpointable_layers
        if names is not None:
            return all(type(layer).__name__ in names for layer in layers)
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        return any(next(module.parameters(), None) is not None for module in modules)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets `activation_checkpoint_interval`."""
        self.activation_checkpoint_interval = interval

    def topology(self) -> ProcessTopology | None:
        """The topology that was given."""
        return self._topology

    def num_pipeline_stages(self) -> int | None:
        """The number of stages that was asked for."""
        return self.num_stages

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """None; a subclass may name further losses, which aren't reported here."""
        return None


def _run(layers: list[Layer], *inputs: Any) -> Any:
    x: Any = inputs[0] if len(inputs) == 1 else inputs
    for layer in layers:
        x = layer(x)
    return x


def _name_of(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")
