"""Matrix products of linear layers in 8 bits, by scales that each step finds anew.

Nothing of the module is replaced: while a layer runs, the product of its own weight is another.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from spmdzero._logging import log_once
from spmdzero._names import did_you_mean
from spmdzero._user_line import user_line
from spmdzero.backend.forms._quantized import (
    absmax,
    largest,
    power_of_two,
    quantized,
    scaled_product,
)
from spmdzero.backend.forms._work import Product, counted_as
from spmdzero.backend.protocols._region import LowPrecision
from spmdzero.backend.replica._class_calls import calls_replaced
from spmdzero.backend.replica._kept_by_name import matching
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

_KEY = "spmd.products"
_NEVER_CALLED = "NonDynamicallyQuantizableLinear"
# A product of a narrower layer, as LoRA's, isn't faster in 8 bits: a TPU's has tiles of 128.
_NARROW = 128
# Left out unless told otherwise: what a model says in the end, and what chooses experts.
_SKIPPED = ("lm_head", "router", "gate")
# As torchao, so that no value is divided by 0.
_LEAST = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Formats:
    """How operands become 8 bits.

    Attributes:
        forward: dtype of a layer's input and weight.
        gradient: dtype of the gradient by its output.
        by_rows: whether each row has a scale, of the dims that a product adds up, and not each
            tensor.
        powers: whether scales are powers of two.
    """

    forward: torch.dtype
    gradient: torch.dtype
    by_rows: bool
    powers: bool = False


# The recipes of fp8 are torchao's, version 0.14 (torchao/float8/config.py).
_FORMATS: Mapping[tuple[str, str], _Formats] = {
    ("fp8", "tensorwise"): _Formats(
        forward=torch.float8_e4m3fn, gradient=torch.float8_e5m2, by_rows=False
    ),
    ("fp8", "rowwise"): _Formats(
        forward=torch.float8_e4m3fn, gradient=torch.float8_e4m3fn, by_rows=True, powers=True
    ),
    ("int8", "tensorwise"): _Formats(forward=torch.int8, gradient=torch.int8, by_rows=False),
    ("int8", "rowwise"): _Formats(forward=torch.int8, gradient=torch.int8, by_rows=True),
}


class ScaledProducts:
    """Linear layers whose products are of 8 bits.

    Args:
        model: the model that is trained.
        policy: the dtype, the recipe, and what is left out; None for no layer at all.

    Raises:
        SpmdZeroConfigError: a name that is left out is of no module, or no layer is left.
    """

    def __init__(self, model: nn.Module, policy: LowPrecision | None) -> None:
        self._dims: dict[int, int] = {}
        self._met = set[int]()
        if policy is None:
            return
        self._formats, self._model = _FORMATS[policy.dtype, policy.recipe], model
        layers = {name: m for name, m in model.named_modules() if _inner_dim(m) is not None}
        left_out = _left_out(model, layers, policy)
        chosen = {name: m for name, m in layers.items() if name not in left_out}
        if not chosen:
            why = f" but those that stay as they are, {_named(left_out)}" if left_out else ""
            raise SpmdZeroConfigError(
                key=_KEY,
                value=policy.dtype,
                reason=f"{type(model).__name__} has no linear layer{why}: layers of less than "
                f"{_NARROW} inputs or outputs, parametrized ones, and what is skipped stay so",
                fix="Leave the key out.",
            )
        self._dims = {id(module): cast(int, _inner_dim(module)) for module in chosen.values()}
        self._kinds = _outermost({type(module) for module in chosen.values()})
        self._waiting = {id(module): _starred(name) for name, module in chosen.items()}
        rest = f"; {_named(left_out)} as before" if left_out else ""
        log_once(f"{len(chosen)} linear layers multiply in {policy.dtype}, {policy.recipe}{rest}")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which these layers multiply in 8 bits."""
        with contextlib.ExitStack() as stack:
            for kind in self._kinds if self._dims else ():
                stack.enter_context(calls_replaced(kind, self._called))
            yield
        if self._dims and self._waiting:
            self._tell_what_was_not_met()

    def _tell_what_was_not_met(self) -> None:
        """Tells, after the first forward, which layers' products were none of their own call."""
        waiting, self._waiting = self._waiting, {}
        met = {waiting[one] for one in self._met if one in waiting}
        missed = dict.fromkeys(name for name in waiting.values() if name not in met)
        # Of equal blocks in a loop one is called.
        if not met:
            raise SpmdZeroUsageError(
                f'{user_line(self._model)}: "{_KEY}": no linear layer has multiplied its input by '
                f"its own weight in its forward ({', '.join(missed)}): their weights are used "
                "elsewhere, as attention modules do. Call the layers, or leave the key out"
            )
        if missed:
            log_once(
                f"{_KEY}: {', '.join(missed)} didn't multiply by their own weights in the first "
                "forward, and have stayed as they were there"
            )

    def _called(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        dim = self._dims.get(id(module))
        if dim is None:
            return call(module, *args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), None)
        with _OfLayer(module, dim, self._formats, given) as product:
            made = call(module, *args, **kwargs)
        if product.done:
            self._met.add(id(module))
        return made


class _OfLayer(TorchFunctionMode):
    """Computes the product with a layer's own weight in 8 bits.

    Args:
        module: the layer.
        dim: that of its weight which is added up.
        formats: of the operands.
        given: the layer's input.

    Attributes:
        done: whether there was such a product.
    """

    def __init__(self, module: nn.Module, dim: int, formats: _Formats, given: Any) -> None:
        super().__init__()
        self._module, self._dim, self._formats, self._given = module, dim, formats, given
        self.done = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight: Any = self._module.weight
        if func is F.linear:
            x, given, bias = _arguments(("input", "weight", "bias"), args, kwargs)
        elif func is torch.addmm and self._dim == 0 and kwargs.keys() <= {"input", "mat1", "mat2"}:
            # That of transformers' Conv1D.
            bias, x, given = _arguments(("input", "mat1", "mat2"), args, kwargs)
        else:
            return func(*args, **kwargs)
        if given is not weight or not x.is_floating_point():
            return func(*args, **kwargs)
        if x.dtype != given.dtype and not torch.is_autocast_enabled(x.device.type):
            # torch refuses it.
            return func(*args, **kwargs)
        self.done = True
        # Conv1D makes one dim of rows and positions, which devices may share.
        flattens = self._dim == 0 and isinstance(self._given, torch.Tensor)
        apart = self._given if flattens else x
        made = _multiplied(apart, weight, bias, dim=self._dim, formats=self._formats)
        return made if self._dim else made.reshape(-1, made.shape[-1])


def _arguments(names: tuple[str, ...], args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _multiplied(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dim: int,
    formats: _Formats,
) -> torch.Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would cast the operands so, and autograd knows these casts.
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dim() == 1:
        return _multiplied(x[None], weight, bias, dim=dim, formats=formats)[0]
    flops = 2.0 * x.numel() * weight.shape[1 - dim]
    with counted_as(Product(flops=flops, operands=((x,), (weight,)))):
        try:
            made = cast(torch.Tensor, _Product.apply(x, weight, dim, formats))
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            raise SpmdZeroUsageError(
                f'"{_KEY}": torch.func can\'t differentiate or map products of 8 bits. Leave the '
                'layer out: {"skip": ["its.name"]}'
            ) from None
    return made if bias is None else made + bias.to(made.dtype)


class _Product(torch.autograd.Function):
    """`x @ weight.T` in 8 bits; `x @ weight` where the weight's dim 0 is added up."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, dim: int, formats: _Formats
    ) -> torch.Tensor:
        ctx.dim, ctx.formats, ctx.dtypes = dim, formats, (x.dtype, weight.dtype)
        few = formats.forward
        with torch.autocast(x.device.type, enabled=False):
            one = _few(x, few, formats, along=(x.dim() - 1,))
            other = _few(weight, few, formats, along=(dim,))
            # By rows, the backward adds other dims up, and needs other scales.
            of_x, of_weight = ((x,), (weight,)) if formats.by_rows else (one, other)
            of_both = zip((of_x, of_weight), ctx.needs_input_grad[1::-1], strict=True)
            kept = [t if needed else None for few, needed in of_both for t in few]
            ctx.save_for_backward(*kept)
            return _product(one, other, along=((x.dim() - 1,), (dim,)), dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[bad-override]
        grad: torch.Tensor = grads[0]
        kept, formats, dim = ctx.saved_tensors, ctx.formats, ctx.dim
        last, rows = (grad.dim() - 1,), tuple(range(grad.dim() - 1))
        by_x: torch.Tensor | None = None
        by_weight: torch.Tensor | None = None

        def few_of_grad(along: tuple[int, ...]) -> _Few:
            return _few(grad, formats.gradient, formats, along=along)

        def few_of(place: int, along: tuple[int, ...]) -> _Few:
            if not formats.by_rows:
                return kept[2 * place], kept[2 * place + 1]
            return _few(kept[place], formats.forward, formats, along=along)

        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                outputs = (1 - dim,)
                by_x = _product(
                    few_of_grad(last), few_of(1, outputs), along=(last, outputs),
                    dtype=ctx.dtypes[0],
                )  # fmt: skip
            if ctx.needs_input_grad[1]:
                pair = few_of_grad(rows), few_of(0, rows)
                one, other = pair if dim == 1 else pair[::-1]
                by_weight = _product(one, other, along=(rows, rows), dtype=ctx.dtypes[1])
        return by_x, by_weight, None, None


# The values, and what they are multiplied by: 0-dim, or of length 1 along the dims added up.
_Few = tuple[torch.Tensor, torch.Tensor]


def _few(x: torch.Tensor, dtype: torch.dtype, formats: _Formats, *, along: tuple[int, ...]) -> _Few:
    scale = largest(dtype) / absmax(x, along if formats.by_rows else ()).clamp(min=_LEAST)
    if formats.powers:
        scale = power_of_two(scale)
    return quantized(x, scale, dtype), scale.reciprocal()


def _product(
    one: _Few, other: _Few, *, along: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> torch.Tensor:
    (a, unit_a), (b, unit_b) = one, other
    if unit_a.dim():
        left = b.dim() - len(along[1])
        unit_a = unit_a.squeeze(along[0]).reshape(*_rest(a.shape, along[0]), *[1] * left)
        unit_b = unit_b.squeeze(along[1])
    return scaled_product(a, b, along=along, scales=(unit_a, unit_b), dtype=dtype)


def _rest(shape: torch.Size, along: tuple[int, ...]) -> list[int]:
    return [length for dim, length in enumerate(shape) if dim not in along]


def _inner_dim(module: nn.Module) -> int | None:
    """The dim of a layer's weight that its product adds up; None for another module."""
    kind = type(module)
    if isinstance(module, nn.Linear):
        dim = 1
    elif kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        dim = 0
    else:
        return None
    own = module._parameters.get("weight")
    # Attention's own never runs, as attention takes its weight.
    if isinstance(own, UninitializedParameter) or kind.__name__ == _NEVER_CALLED:
        return None
    return dim if own is None or own.dim() == 2 else None


def _left_out(
    model: nn.Module, layers: Mapping[str, nn.Module], policy: LowPrecision
) -> dict[str, str]:
    """Name of a layer that keeps its dtype -> why."""
    # A module may have several names.
    modules = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    names, found = [*modules], dict[str, str]()
    first = {id(m): name for name, m in layers.items()}
    for pattern in _SKIPPED if policy.skip is None else policy.skip:
        matches = matching(names, pattern)
        if not matches and policy.skip is not None:
            raise SpmdZeroConfigError(
                key=f"{_KEY}.skip",
                value=list(policy.skip),
                reason=f"no module's name is {pattern!r}, where * is anything but a dot",
                fix=did_you_mean(pattern, [*names, *{n.rpartition(".")[2] for n in names}])
                or f"There are for example {json.dumps([*layers][-3:])}.",
            )
        inside = [id(m) for name in matches for m in modules[name].modules()]
        found |= {first[one]: pattern for one in inside if one in first}
    found |= {n: "parametrized" for n, m in layers.items() if m._parameters.get("weight") is None}
    narrow = {n: "narrow" for n, m in layers.items() if min(cast(Any, m).weight.shape) < _NARROW}
    return found | narrow


def _named(left_out: Mapping[str, str]) -> str:
    tails = dict.fromkeys(name.rpartition(".")[2] for name in left_out)
    return f"{len(left_out)} ({', '.join(tails)})"


def _starred(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _outermost(kinds: set[type[nn.Module]]) -> list[type[nn.Module]]:
    """The classes of which none inherits from another: a call is replaced once."""
    return [k for k in kinds if not any(k is not other and issubclass(k, other) for other in kinds)]
