"""The operations that `torch.autocast` casts on the devices: CUDA's lists, on both backends.

torch has lists for each kind of device, and torch_xla brings different ones. A DeepSpeed user
knows CUDA's (torch's documentation, "Automatic Mixed Precision", "CUDA Op-Specific Behavior";
aten/src/ATen/autocast_mode.h). Both backends' tensors carry the dispatch key by which torch finds
the rules of `torch.autocast` for their device. This file registers those rules.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from spmdzero.backend.forms._tree import mapped
from spmdzero.errors import SpmdZeroUsageError

_aten = torch.ops.aten


def _listed(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# Operations on no list compute in the dtypes of their inputs.
LOWER = _listed(
    "_convolution _convolution.deprecated _scaled_dot_product_flash_attention addbmm addmm addmv "
    "addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot "
    "linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell "
    "scaled_dot_product_attention"
)
FLOAT = _listed(
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d acos asin "
    "binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod "
    "cumprod.dimname cumsum "
    "cumsum.dimname dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss "
    "huber_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord "
    "linalg_vector_norm log log10 log1p log2 log_softmax.Dimname log_softmax.int logsumexp "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm "
    "nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim nuclear_norm "
    "nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod "
    "prod.dim_Dimname prod.dim_int reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss "
    "softmax.Dimname softmax.int softplus sum sum.dim_DimnameList sum.dim_IntList tan "
    "triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"
)
WIDEST = _listed(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)
REFUSED = "binary_cross_entropy"
# torch_xla's kernels of these operations promote as CUDA's do without autocast.
_AS_THEY_ARE = ("cat", "stack", "index_copy")

_library: list[torch.library.Library] = []
_Caster = Callable[[torch.Tensor], torch.Tensor]


def keys_of(device_type: str) -> Any:
    """The set with autocast's dispatch key for tensors of `device_type`."""
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_name(device_type)))


def _name(device_type: str) -> str:
    return f"Autocast{device_type.upper()}"


@functools.cache
def register(device_type: str) -> None:
    """Makes autocast for `device_type` follow these lists until the process ends."""
    name = _name(device_type)
    others = torch._C._dispatch_get_registrations_for_dispatch_key(name)
    rest, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _library.extend((rest, library))
    rules: dict[str, Any] = {REFUSED: _refuse}
    for policy, listed in ((_lower, LOWER), (_float, FLOAT), (_widest, WIDEST)):
        for operation in listed:
            if (func := _overload(operation)) is not None:
                casts = _Casts(func, device_type, keys_of(device_type))
                rules[operation] = functools.partial(policy, casts)
    for operation in _of_aten(others):
        if operation.partition(".")[0] not in _AS_THEY_ARE:
            rules.setdefault(operation, torch.library.fallthrough_kernel)
    with warnings.catch_warnings():
        # torch warns where torch_xla has registered a rule before.
        warnings.simplefilter("ignore")
        if not others:
            rest.fallback(torch.library.fallthrough_kernel, name)
        for operation, rule in rules.items():
            library.impl(operation, rule, name)


def _of_aten(registered: Iterable[str]) -> list[str]:
    found = [name.partition("::") for name in registered]
    return [name for namespace, _, name in found if namespace == "aten"]


def _overload(name: str) -> Any:
    """torch's operation of that name, None where this release of torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet, None), overload or "default", None)


@dataclasses.dataclass(frozen=True)
class _Casts:
    """An operation, and the casts of its arguments.

    Attributes:
        func: torch's operation.
        device_type: of the tensors that are cast.
        keys: the set with autocast's key for them.
    """

    func: Any
    device_type: str
    keys: Any

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], cast: _Caster) -> Any:
        """Calls the operation on the cast arguments, with autocast turned off inside."""
        given = self.cast(args, cast), self.cast(kwargs, cast)
        # The function modes outside have already handled this call.
        with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(self.keys):
            return self.func(*given[0], **given[1])

    def cast(self, tree: Any, cast: _Caster) -> Any:
        """A copy of an operation's arguments, with `cast` applied where autocast may cast."""

        def each(tensor: torch.Tensor) -> torch.Tensor:
            mine = tensor.device.type == self.device_type and tensor.is_floating_point()
            return cast(tensor) if mine and tensor.dtype != torch.float64 else tensor

        return mapped(tree, torch.Tensor, each)

    def asks_for_dtype(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the caller has given the result's dtype, as `softmax(x, dim, dtype)` can."""
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == "dtype":
                given = args[place] if place < len(args) else kwargs.get("dtype")
                return given is not None
        return False


def _lower(casts: _Casts, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(casts.device_type)
    return casts.call(args, kwargs, lambda tensor: tensor.to(dtype))


def _float(casts: _Casts, *args: Any, **kwargs: Any) -> Any:
    asks = casts.asks_for_dtype(args, kwargs)
    return casts.call(args, kwargs, lambda tensor: tensor if asks else tensor.float())


def _widest(casts: _Casts, *args: Any, **kwargs: Any) -> Any:
    found: list[torch.dtype] = [torch.get_autocast_dtype(casts.device_type)]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.dtype)
        return tensor

    casts.cast(args, note)
    widest = functools.reduce(torch.promote_types, found)
    return casts.call(args, kwargs, lambda tensor: tensor.to(widest))


def _refuse(*_: Any, **__: Any) -> Any:
    raise SpmdZeroUsageError(
        "binary_cross_entropy (BCELoss) under autocast, which torch refuses on CUDA too: a "
        "probability in half precision has a loss and a gradient that overflow. Use "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) on what goes into the sigmoid"
    )
