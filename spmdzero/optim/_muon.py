"""Muon."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spmdzero.config import OPTIMIZERS
from spmdzero.optim._adam import Adam
from spmdzero.optim._heads import attention_heads
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule, WholeTensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RESTART = 2


def gather_dtype(method: str) -> torch.dtype:
    """The dtype in which `orthogonalize` computes, so that a wider argument gains nothing."""
    return torch.bfloat16 if method == "standard" else torch.float32


def orthogonalize(matrix: Tensor, *, method: str) -> Tensor:
    """`[..., rows, columns]` with all singular values moved close to 1, in `gather_dtype`.

    Runs the quintic iteration of https://kellerjordan.github.io/posts/muon five times, with the
    coefficients and rounding of DeepSpeed (runtime/zero/muon/original_muon.py): "standard" in
    bf16 on the matrix; "gram" on its square Gram matrix, the same polynomial, in fp32, which is
    DeepSpeed's choice where a device does not compute in fp16.
    """
    x = matrix.to(gather_dtype(method))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # x.norm() would round its sum to bf16 at every addition on some backends.
    norm = x.float().square().sum(dim=(-2, -1), keepdim=True).sqrt().to(x.dtype)
    x = x / (norm + 1e-7)
    square = x.size(-2) == x.size(-1)
    x = _plain(x) if method == "standard" or square else _gram(x)
    return x.mT if tall else x


def aspect_scale(rows: int, columns: int) -> float:
    """sqrt(rows / columns); 1 for a matrix that is not tall."""
    return math.sqrt(rows / columns) if rows > columns else 1.0


def _plain(x: Tensor) -> Tensor:
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _sum(_A, x, _sum(_B, gram, (_C * gram) @ gram) @ x)
    return x


def _sum(factor: float, x: Tensor, y: Tensor) -> Tensor:
    """``factor * x + y``, rounded to their dtype once, as in DeepSpeed's compiled kernel."""
    return (factor * x.float() + y.float()).to(x.dtype)


def _gram(x: Tensor) -> Tensor:
    """The iteration on ``x @ x.mT``, https://tridao.me/blog/2026/gram-newton-schulz."""
    identity = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    gram = x @ x.mT
    factor: Tensor | None = None
    for i in range(_ITERATIONS):
        if i == _RESTART and factor is not None:
            x = factor @ x
            gram, factor = x @ x.mT, None
        z = _B * gram + (_C * gram) @ gram
        factor = z + _A * identity if factor is None else _A * factor + z @ factor
        step = _A * gram + z @ gram
        gram = _A * step + z @ step
    assert factor is not None
    return factor @ x


_MUON_KEYS = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
# These aren't FusedAdam's: MuonWithAuxAdam fills them in first
# (runtime/zero/muon/original_muon.py).
_ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def is_muon_parameter(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains a parameter: it has two or more dims, and isn't an embedding or a head.

    This is DeepSpeed's rule (`set_optimizer_flags`), which recognises these by ``embed`` and
    ``lm_head`` in their names, in any case. An embedding of another name, such as ``wte``, is a
    matrix like others.
    """
    return parameter.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def muon_groups(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, params: Mapping[str, Any]
) -> Iterator[tuple[UpdateRule, dict[str, Any]]]:
    """Splits each param group into a Muon and an Adam half; yields each half with its rule.

    The most specific hyperparameter wins: a group's own, then `muon_lr` or `adam_lr`, then the
    config's (DeepSpeed, runtime/engine.py, `_muon_param_groups`). Frozen parameters are left out.

    Args:
        groups: torch param groups.
        model: the module that has the groups' parameters.
        params: the config's ``optimizer.params``.

    Raises:
        SpmdZeroConfigError: `per_head_muon` with a model of which no heads are known.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    heads = {}
    if params.get("per_head_muon"):
        matrices = [name for p, name in names.items() if is_muon_parameter(name, p)]
        heads = attention_heads(model, matrices)
    adam = Adam(decoupled=bool(params.get("adam_w_mode", True)), bias_correction=True)
    for index, group in enumerate(groups):
        prefix = group.get("name") or (f"group{index}" if len(groups) > 1 else None)
        trained = [p for p in group["params"] if p.requires_grad]
        muon = [p for p in trained if is_muon_parameter(names[p], p)]
        others = [p for p in trained if not is_muon_parameter(names[p], p)]
        if muon:
            settings = _settings(_MUON_KEYS, params, "muon_lr", group)
            rule = Muon(ns_method=settings.get("ns_method", "gram"), heads=heads)
            yield rule, {**rule.defaults, **settings, **_labels(prefix, "muon"), "params": muon}
        if others:
            settings = _settings(_ADAM_KEYS, params, "adam_lr", group)
            defaults = adam.defaults | _ADAM_DEFAULTS | {"use_muon": False}
            yield adam, {**defaults, **settings, **_labels(prefix, "adam"), "params": others}


def _settings(
    keys: tuple[str, ...], params: Mapping[str, Any], own_lr: str, group: Mapping[str, Any]
) -> dict[str, Any]:
    given = {key: params[key] for key in keys if params.get(key) is not None}
    if params.get(own_lr) is not None:
        given["lr"] = params[own_lr]
    return given | {key: group[key] for key in keys if key in group}


def _labels(prefix: str | None, half: str) -> dict[str, str]:
    return {"name": f"{prefix}-{half}-params" if prefix else f"{half}-params"}


@dataclass(frozen=True, kw_only=True)
class Muon(UpdateRule):
    """Muon (https://kellerjordan.github.io/posts/muon) as DeepSpeed's ZeRO-1/2 computes it.

    Nesterov momentum; then the orthogonalised update replaces the gradient, so that the global norm
    and the clipping see the update (DeepSpeed, runtime/zero/stage_1_and_2.py,
    `get_flat_partition`). With gradient_clipping below that norm, which is usually far above 1,
    clipping therefore scales every update; that is DeepSpeed's meaning, and kept.

    It costs one gather of the update per parameter, in bf16 ("standard") or fp32 ("gram"); each
    device then orthogonalises the whole matrix.

    Attributes:
        ns_method: the Newton-Schulz iteration, see `orthogonalize`.
        heads: name of a parameter `[heads * width, columns]` -> heads, each of which is a matrix of
            its own.
    """

    parameters = OPTIMIZERS["Muon"]
    ns_method: Literal["gram", "standard"]
    heads: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def slots(self) -> tuple[str, ...]:
        """The slot of the momentum."""
        return ("momentum_buffer",)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of MuonWithAuxAdam (DeepSpeed, runtime/zero/muon/original_muon.py)."""
        return {
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "ns_method": self.ns_method,
            "use_muon": True,
        }

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices that are part of the compiled update."""
        return {"ns_method": self.ns_method}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """lr, the decay of a step, and the momentum with its complement."""
        return {
            "lr": float(group["lr"]),
            "decay": float(group["lr"]) * float(group["weight_decay"]),
            "momentum": float(group["momentum"]),
            "one_minus_momentum": 1.0 - float(group["momentum"]),
        }

    def direction(self, grad: Tensor, state: Named, hyper: Named, whole: WholeTensor) -> Updated:
        """The orthogonalised momentum, and the new momentum."""
        buffer = state["momentum_buffer"]
        buffer = buffer + (grad - buffer) * hyper["one_minus_momentum"]
        ahead = grad + (buffer - grad) * hyper["momentum"]
        matrix = whole.gather(ahead.to(gather_dtype(self.ns_method)))
        if matrix.dim() == 4:  # a convolution's filters, one per row
            matrix = matrix.flatten(1)
        sizes = whole.shape[-2:]
        if whole.name in self.heads:
            matrix = matrix.reshape(self.heads[whole.name], -1, sizes[1])
            sizes = tuple(matrix.shape[1:])
        scale = aspect_scale(*sizes)
        update = orthogonalize(matrix, method=self.ns_method) * scale
        stored = whole.store(update.reshape(whole.shape)).to(grad.dtype)
        return stored, {"momentum_buffer": buffer}

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The parameter and its state after one step along `grad`, the result of `direction`."""
        return param - (grad * terms.factors["lr"] + param * terms.factors["decay"]), dict(state)
