"""Reads what transformers' models say of their masks, and of attention that torch doesn't have.

Their masks are tensors of all pairs of positions, made by few functions. While a forward runs these
take note beside each mask of what it says. The mask stays as it is, so who does something else
with it loses nothing; a compiler leaves it out where nothing reads it.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from spmdzero.backend._current import arrays
from spmdzero.backend._packing import packing
from spmdzero.backend.attention._call import Seen
from spmdzero.backend.forms._said import said_of, say
from spmdzero.backend.replica._readers import current_reader

# Computes attention of query, key, value and mask, by dropout, scale, cap and sinks; None where the
# model has to.
Attend = Callable[..., torch.Tensor | None]
# Context around a model's own attention of query, key, value and mask.
Around = Callable[..., contextlib.AbstractContextManager[None]]


def what_is_seen(mask: torch.Tensor | None) -> Seen | None:
    """Says what `mask` shows; None where it isn't known, or was written since."""
    seen = said_of(mask) if isinstance(mask, torch.Tensor) else None
    return seen if isinstance(seen, Seen) else None


@contextlib.contextmanager
def masks_noted() -> Iterator[None]:
    """Context in which masks that transformers makes are noted; nothing if it isn't there."""
    library: Any = sys.modules.get("transformers.masking_utils")
    if library is None or not hasattr(library, "AttentionMaskInterface"):
        yield
        return
    made = library.AttentionMaskInterface._global_mapping
    ours = {name: _noting(made[name], library) for name in ("sdpa", "eager")}
    with mock.patch.dict(made, ours):
        yield


def _noting(make: Callable[..., Any], library: Any) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        mask = make(*args, **named)
        if isinstance(mask, torch.Tensor) and not args:
            seen = _what_is_asked_for(named, library)
            if seen is not None:
                say(mask, seen)
        return mask

    return made


def _what_is_asked_for(named: Mapping[str, Any], library: Any) -> Seen | None:
    """Says what a mask that is asked for by these arguments shows; None where that isn't known."""
    offsets = named.get("q_offset", 0), named.get("kv_offset", 0)
    lengths = named["q_length"], named["kv_length"]
    if any(not isinstance(one, int) or one for one in offsets) or lengths[0] != lengths[1]:
        return None
    found = _pattern(named.get("mask_function"), library)
    keys = named.get("attention_mask")
    if found is None or (keys is not None and keys.shape != (named["batch_size"], lengths[1])):
        return None
    causal, window = found
    keys = None if keys is None else keys.to(torch.bool)[:, None, None, :]
    return Seen(causal=causal, window=window, keys=keys)


def _pattern(function: Any, library: Any) -> tuple[bool, int | None] | None:
    """Whether a function of positions is causal, and its window; None if it is another."""
    whole = {library.causal_mask_function: True, library.bidirectional_mask_function: False}
    if function in whole:
        return whole[function], None
    # What is asked for is a closure: the code says which, its cells hold the window.
    one_way, both_ways = (
        library.sliding_window_overlay,
        library.sliding_window_bidirectional_overlay,
    )
    if not _is_made_by(function, library.and_masks, library.causal_mask_function):
        return None
    overlay, *rest = inspect.getclosurevars(function).nonlocals["mask_functions"]
    for make, inside, more in (
        (one_way, library.causal_mask_function, 0),
        (both_ways, library.bidirectional_mask_function, 1),
    ):
        if rest == [inside] and _is_made_by(overlay, make, 1):
            window = inspect.getclosurevars(overlay).nonlocals["sliding_window"]
            return (whole[inside], window + more) if window > 0 else None
    return None


def _is_made_by(function: Any, make: Callable[..., Any], argument: Any) -> bool:
    return getattr(function, "__code__", None) is make(argument).__code__


_OF_PACKING = "find_packed_sequence_indices"


@contextlib.contextmanager
def masks_without_reading(owner: nn.Module) -> Iterator[None]:
    """Context in which transformers makes a mask wherever it would read whether one is needed.

    It reads whether an attention mask hides anything, whether ids are padded, or rows hold several
    texts, at each forward, and replicas may disagree on it. What is the same for all, and at each
    step, it may read. It reads whether rows hold several texts unless `owner`, whose forward runs,
    is one of `packing`: in a loop of one's own position_ids say that they don't, as a rule, and a
    mask would cost the kernel.
    """
    library: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_tracing", None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def is_tracing(tensor: Any = None) -> bool:
        if original(tensor) or not (isinstance(tensor, torch.Tensor) and arrays.is_mine(tensor)):
            return original(tensor)
        asks = sys._getframe(1).f_code.co_name
        if asks == _OF_PACKING and owner not in packing:
            return False
        reader = current_reader()
        return reader is None or not reader.is_fixed(tensor)

    with contextlib.ExitStack() as patches:
        for module in _having(original, len(sys.modules)):
            patches.enter_context(mock.patch.object(module, "is_tracing", is_tracing))
        yield


@functools.lru_cache(maxsize=1)
def _having(original: Any, _: int) -> list[Any]:
    """The modules that have imported `is_tracing`, looked for when there are new modules."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and vars(module).get("is_tracing") is original
    ]


@contextlib.contextmanager
def with_caps_and_sinks(attend: Attend, around: Around) -> Iterator[None]:
    """Context in which `attend` computes attention that has a soft cap or sinks.

    Models with these have no way but a function of their own, which transformers calls
    ``"eager"``, and which computes what `attend` doesn't, inside of `around`.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    interface = getattr(library, "AttentionInterface", None)
    if not hasattr(interface, "get_interface"):
        yield
        return
    found = interface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = found(self, attn_implementation, default)
        if function is not default:
            return function
        return functools.partial(_called, attend, around, function)

    with mock.patch.object(interface, "get_interface", get_interface):
        yield


def _called(
    attend: Attend,
    around: Around,
    own: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *more: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention of transformers': `[rows, length, heads, width]`, and weights where it has."""

    def plain() -> Any:
        with around(query, key, value, attention_mask):
            return own(module, query, key, value, attention_mask, *more, **named)

    cap, sinks = named.get("softcap"), named.get("s_aux")
    weights = named.get("output_attentions") or getattr(module.config, "output_attentions", False)
    if more or weights or (cap is None and sinks is None) or named.get("position_bias") is not None:
        return plain()
    out = attend(
        query, key, value, attention_mask, dropout_p=named.get("dropout", 0.0),
        scale=named.get("scaling"), soft_cap=cap, sinks=sinks,
    )  # fmt: skip
    return plain() if out is None else (out.transpose(1, 2).contiguous(), None)
