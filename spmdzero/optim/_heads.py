"""The attention heads of a model's projections, for Muon's `per_head_muon`.

The rules are those of DeepSpeed 0.19.8 (deepspeed/__init__.py, `_resolve_attention_head_count`;
module_inject/tp_shard.py, `AutoTPMeta`): the name of a layer says that its rows may be heads, and
they are where the counts and widths in ``model.config`` multiply to exactly its rows.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from spmdzero.errors import SpmdZeroConfigError

logger = logging.getLogger("spmdzero")

# How the names of layers begin, in lower case.
_QUERY = ("q_proj", "query", "wq")
_VALUE = ("v_proj", "value", "wv")
_KEY = ("k_proj", "key", "wk")
_MLA_QUERY, _MLA_KEY_VALUE = ("q_b_proj",), ("kv_b_proj",)
_NOT_IN_HEADS = (
    *("qkv_proj", "query_key_value", "c_attn", "in_proj_qkv", "wqkv"),
    *("q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa"),
)

# Where configs have the number of heads.
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_KEY_VALUE_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"),
    *("num_attention_heads", "n_heads", "attention_heads"),
)

# Linear attention has heads of its own, which the module tells and not the config.
_LINEAR_ATTENTION = ("KimiDeltaAttention",)
_OWN_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_OWN_KEY_HEADS = ("num_k_heads", "num_key_value_heads", "num_kv_heads", *_OWN_HEADS)
_OWN_VALUE_HEADS = ("num_v_heads", *_OWN_KEY_HEADS)
_OWN_WIDTH, _OWN_VALUE_WIDTH = ("head_k_dim",), ("head_v_dim",)
_ANY_WIDTH = ("head_dim", "head_size")


class _Heads(NamedTuple):
    number: int
    width: int


def attention_heads(model: nn.Module, names: list[str]) -> dict[str, int]:
    """Finds the number of heads in the rows of each attention projection of a model.

    A projection that isn't in the result is to be taken whole: a fused one (``c_attn``,
    ``qkv_proj``), the one behind the attention, whose heads are in its columns, and one whose rows
    the config doesn't explain, which a warning names.

    Args:
        model: a module of Hugging Face's kind, which says its heads in ``config``.
        names: the parameters to look at, all of them with two dims or more.

    Returns:
        Name of a parameter `[heads * width, columns]` -> heads.

    Raises:
        SpmdZeroConfigError: no parameter's heads are found.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    parameters = dict(model.named_parameters())
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[str, int] = {}
    heads_of_layers: dict[str, str] = {}
    left: dict[str, str] = {}
    for name in names if _first(config, _HEADS) else ():
        layer = _layer(name)
        candidates = _candidates(layer, config, modules.get(".".join(name.split(".")[:-2])))
        if candidates is None:
            continue
        heads = _confirmed(parameters[name], candidates)
        if isinstance(heads, str):
            left[layer] = heads
        else:
            found[name] = heads.number
            heads_of_layers[layer] = f"{heads.number} of {heads.width} rows"
    if not found:
        raise SpmdZeroConfigError(
            key="optimizer.params.per_head_muon",
            value=True,
            reason="no attention projection with a known number of heads is in this model: "
            + (_listed(left) or _nothing(config)),
            fix="Write false to orthogonalise whole matrices, or give the model a config with "
            "num_attention_heads and name its projections q_proj, k_proj and v_proj.",
        )
    if left:
        logger.warning(
            "per_head_muon: Muon orthogonalises these attention layers whole, as their heads "
            "aren't known: %s",
            _listed(left),
        )
    logger.info("per_head_muon: the heads are %s", _listed(heads_of_layers))
    return found


def _listed(layers: dict[str, str]) -> str:
    return "; ".join(f"{layer}: {what}" for layer, what in sorted(layers.items()))


def _nothing(config: object) -> str:
    if not _first(config, _HEADS):
        return "its config has no number of attention heads"
    return "no layer has the name of a projection of its own for queries, keys or values"


def _layer(name: str) -> str:
    """The last module's name: ``q_proj`` of ``layers.0.self_attn.q_proj.weight``."""
    return name.split(".")[-2:][0].lower()


def _first(owner: object, names: tuple[str, ...]) -> Any:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _candidates(layer: str, config: object, owner: nn.Module | None) -> set[_Heads] | None:
    """The heads that a layer of this name may have; None where none are expected."""
    if layer.startswith(_NOT_IN_HEADS):
        return None
    if layer.startswith((*_QUERY, *_KEY, *_VALUE)):
        own = _own(layer, owner)
        return own or {heads for heads in _standard(layer, config) if heads}
    if layer.startswith((*_MLA_QUERY, *_MLA_KEY_VALUE)):
        return {heads for heads in _latent(layer, config) if heads}
    return None


def _own(layer: str, owner: nn.Module | None) -> set[_Heads]:
    if type(owner).__name__ not in _LINEAR_ATTENTION:
        return set()
    counts, width = _OWN_HEADS, _OWN_WIDTH
    if layer.startswith(_VALUE):
        counts, width = _OWN_VALUE_HEADS, _OWN_VALUE_WIDTH
    elif layer.startswith(_KEY):
        counts = _OWN_KEY_HEADS
    heads = _heads(_first_count(owner, counts), _first_count(owner, (*width, *_ANY_WIDTH)))
    return {heads} if heads else set()


def _first_count(owner: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if _is_count(value)), None)


def _standard(layer: str, config: object) -> Iterator[_Heads | None]:
    count, width = _first(config, _HEADS), getattr(config, "head_dim", None)
    if width is None and _is_count(count):
        hidden = getattr(config, "hidden_size", None) or 0
        width = hidden // count if hidden % count == 0 else None
    if layer.startswith((*_KEY, *_VALUE)):
        yield _heads(_first(config, _KEY_VALUE_HEADS) or count, width)
    else:
        yield from _latent(layer, config)
        yield _heads(count, width)


def _latent(layer: str, config: object) -> Iterator[_Heads | None]:
    """DeepSeek's attention, whose keys' and values' projection has them both in each head."""
    plain = getattr(config, "qk_nope_head_dim", None)
    ends = "v_head_dim" if layer.startswith(_MLA_KEY_VALUE) else "qk_rope_head_dim"
    more = getattr(config, ends, None)
    if plain is not None and more is not None:
        yield _heads(_first(config, _HEADS), plain + more)


def _heads(count: object, width: object) -> _Heads | None:
    return _Heads(count, width) if _is_count(count) and _is_count(width) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _confirmed(parameter: torch.Tensor, candidates: set[_Heads]) -> _Heads | str:
    """The candidate that a parameter's rows are, or why there is none.

    The candidates of one layer differ in their width alone, so no two of them fit.
    """
    if parameter.dim() != 2:
        return f"its weight has {parameter.dim()} dims"
    rows = parameter.shape[0]
    for heads in candidates:
        if heads.number * heads.width == rows:
            return heads
    known = " or ".join(f"{number} heads of {width}" for number, width in sorted(candidates))
    return f"its {rows} rows aren't {known or 'heads, the config has no width'}"
