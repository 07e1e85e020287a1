"""Counts a forward's products, and what it keeps for backward, without values."""

import collections
import contextlib
import copy
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from spmdzero.backend import map_tensors
from spmdzero.backend.replica._candidates import candidates
from spmdzero.backend.replica._keep_sets import block_layers, keep_sets
from spmdzero.backend.replica._kept_by_name import CONTEXT
from spmdzero.config import load_config
from spmdzero.engine import inputs_of
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.nn._causal_lm import fuses_losses
from spmdzero.precision import PrecisionPolicy
from spmdzero.search._asked import Asked
from spmdzero.search._knobs import ROWS, Blocks

# Rows of the forward that is looked at: a norm over rows has none to compare one with.
_ROWS = 2


@dataclass(frozen=True, kw_only=True)
class Product:
    """A linear layer of each block, whose output may stay for backward.

    Attributes:
        name: as a policy names it.
        bytes: of the outputs of a row in all blocks together.
        flops: operations that compute them.
    """

    name: str
    bytes: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward of one row, bytes and operations.

    Attributes:
        blocks: the longest row of equal blocks.
        flops: operations of all matrix products.
        block_flops: those of them in the blocks.
        kept: bytes that autograd keeps for backward outside of the blocks.
        block_kept: bytes that it keeps in all blocks together.
        block_inputs: bytes of the inputs of all blocks together.
        contexts: bytes of what attention returns in them.
        context_flops: those of `block_flops` that attention's kernel does.
        products: the blocks' linear layers.
        keep_sets: names of what may stay of a block, as `keep_sets` has them.
        logits: those of `kept` of which a row has as many numbers as the head has words.
        pairs: bytes of attention's weights of all pairs, which a kernel never holds.
        fuses: whether the model's loss can be computed without logits.
    """

    blocks: Blocks
    flops: float
    block_flops: float
    kept: float
    block_kept: float
    block_inputs: float
    contexts: float
    context_flops: float
    products: tuple[Product, ...]
    keep_sets: tuple[tuple[str, ...], ...]
    logits: float
    pairs: float
    fuses: bool

    def kept_of(self, names: Collection[str]) -> float:
        """Bytes of what these names name, of a row in all blocks together."""
        kept = self.contexts if CONTEXT in names else 0.0
        return kept + sum(product.bytes for product in self.products if product.name in names)

    def flops_of(self, names: Collection[str]) -> float:
        """Operations that compute it."""
        spent = self.context_flops if CONTEXT in names else 0.0
        return spent + sum(product.flops for product in self.products if product.name in names)


def seen_forward(model: nn.Module, asked: Asked) -> Forward:
    """Runs the forward of a model without values, and counts.

    Args:
        model: on the meta device; it stays as it is.
        asked: what the user wrote.

    Raises:
        SpmdZeroUsageError: the forward doesn't run without values.
    """
    dtype = PrecisionPolicy.from_config(load_config({**asked.config, ROWS: 1})).parameter
    return _seen(copy.deepcopy(model).to(dtype), asked)


def _seen(model: nn.Module, asked: Asked) -> Forward:
    # transformers asks tensors without values whether they have any, and knows torch's own kind.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    fakes.put_into(model)
    args, kwargs = map_tensors(inputs_of(asked.batch_of(_ROWS)), lambda _, tensor: fakes.of(tensor))
    blocks = candidates(model)
    rows = collections.Counter(block.series for block in blocks.values())
    longest = max(rows, key=rows.__getitem__, default=None)
    own = {key: block for key, block in blocks.items() if block.series == longest}
    name = next((found.name for found in own.values()), "")
    named = {layer.path: layer.name for layer in block_layers(model)}
    watch = _Watch(model, own, list(model.parameters()), named)
    # It logs what an operation refuses at length, and the error below says it.
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    loud, torchs.disabled = torchs.disabled, True
    try:
        with mode, watch.watching():
            model(*args, **kwargs)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise SpmdZeroUsageError(
            f"the forward of {type(model).__name__} doesn't run with tensors that have shapes and "
            f"no values, with inputs of {_ROWS} rows: {said[0]}. A step that is planned is never "
            "run, so a forward that reads values of its tensors can't be planned"
        ) from error
    finally:
        torchs.disabled = loud
    products = tuple(watch.products())
    called = {CONTEXT, *(product.name for product in products)}
    sets = [kept.names for kept in keep_sets(model, attends=watch.contexts > 0)]
    outputs = _vocabulary(model, own)
    logits = sum(size for shape, size in watch.outside if shape and shape[-1] == outputs)
    return Forward(
        blocks=Blocks(name=name, count=len(own)),
        flops=watch.flops / _ROWS,
        block_flops=watch.block_flops / _ROWS,
        kept=sum(size for _, size in watch.outside) / _ROWS,
        block_kept=watch.block_kept / _ROWS,
        block_inputs=watch.block_inputs / _ROWS,
        contexts=watch.contexts / _ROWS,
        context_flops=watch.context_flops / _ROWS,
        products=products,
        keep_sets=tuple(names for names in sets if called.issuperset(names)),
        logits=logits / _ROWS,
        pairs=watch.pairs / _ROWS,
        fuses=fuses_losses(model),
    )


class _Fakes:
    """Tensors without values that say they are a CPU's: torch has no autocast for "meta"."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # The first of each pair is held, as its id counts only while it lives.
        self._made = dict[int, tuple[torch.Tensor, torch.Tensor]]()

    def put_into(self, model: nn.Module) -> None:
        """Replaces all tensors of a model, those that several modules share by one."""
        for module in model.modules():
            everything: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
            for held in everything:
                tensors = {n: t for n, t in held.items() if isinstance(t, torch.Tensor)}
                held.update({name: self.of(tensor) for name, tensor in tensors.items()})

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor: a parameter of a parameter."""
        if id(tensor) not in self._made:
            # A fake of the engine's own device type ends the process in torch.
            with self._mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
            made.requires_grad_(tensor.requires_grad)
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]


def _vocabulary(model: nn.Module, blocks: Mapping[int, Any]) -> int:
    """Outputs of the widest linear layer outside of blocks, which a head is."""
    inside = {
        id(part) for block in model.modules() if id(block) in blocks for part in block.modules()
    }
    linear = (m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside)
    return max((m.out_features for m in linear), default=0)


class _Watch:
    """Counts what a forward does, in its blocks and outside."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[int, Any],
        parameters: Sequence[torch.Tensor],
        named: Mapping[str, str],
    ) -> None:
        self._model, self._blocks, self._inside, self._named = model, blocks, 0, named
        self._seen: dict[int, Any] = {_memory(parameter): parameter for parameter in parameters}
        self.outside: list[tuple[torch.Size, int]] = []
        self.block_kept = self.block_inputs = self.contexts = 0
        self.flops = self.block_flops = self.context_flops = self.pairs = 0.0
        # Name of a linear layer in its block -> bytes and operations of all blocks.
        self._linear: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context around one forward."""
        self._count = FlopCounterMode(display=False)
        handles = []
        for module in self._model.modules():
            if id(module) in self._blocks:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
                for path, name in self._named.items():
                    passed = functools.partial(self._passed, name)
                    handles.append(module.get_submodule(path).register_forward_hook(passed))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        try:
            with torch.enable_grad(), hooks, self._count, _Attention(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.flops += self._count.get_total_flops()

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._before = self._count.get_total_flops() + self.flops
            given: list[torch.Tensor] = []
            map_tensors((args, kwargs), lambda _, tensor: given.append(tensor) or tensor)
            self.block_inputs += sum(
                _size(t) for t in given if t.is_floating_point() and t.numel() > 1
            )

    def attended(self, context: torch.Tensor, *, flops: float) -> None:
        """Counts a call of attention, which is no product of torch's."""
        self.flops += flops
        if self._inside:
            self.contexts += _size(context)
            self.context_flops += flops

    def _passed(self, name: str, layer: nn.Linear, _: Any, made: torch.Tensor) -> None:
        size, flops = self._linear.get(name, (0.0, 0.0))
        flops += 2 * made.numel() * layer.in_features
        self._linear[name] = size + _size(made), flops

    def products(self) -> Iterator[Product]:
        """The linear layers of each block in the order of their calls."""
        for name, (size, flops) in self._linear.items():
            yield Product(name=name, bytes=size / _ROWS, flops=flops / _ROWS)

    def _leave(self, *_: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self.block_flops += self._count.get_total_flops() + self.flops - self._before

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        # Several operations keep the same tensor, and views of one memory.
        if _memory(tensor) not in self._seen:
            # It is held, as the address counts only while it lives.
            self._seen[_memory(tensor)] = tensor
            size = tensor.untyped_storage().nbytes()
            if self._inside:
                self.block_kept += size
            else:
                self.outside.append((tensor.shape, size))
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Attention(TorchFunctionMode):
    """Counts attention as a kernel's: its products, and what it keeps, without pairs."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = named["query"], named["key"], named["value"]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        shown = 0.5 if named.get("is_causal") or named.get("attn_mask") is not None else 1.0
        self._watch.pairs += 2 * pairs * query.element_size()
        made: Any = _Kernel.apply(query, key, value)
        flops = 2 * shown * pairs * (query.shape[-1] + value.shape[-1])
        self._watch.attended(made, flops=flops)
        return made


class _Kernel(torch.autograd.Function):
    """Attention that keeps its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        made = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, made)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError
