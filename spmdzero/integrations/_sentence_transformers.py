"""sentence-transformers: few lengths where it embeds texts that no loader has padded.

Its Cached losses cut columns of padding off each part of a batch, and `encode`, by which evaluators
embed their texts, pads each batch to its longest. Either way each call has another length, and is a
program to compile. Only this file knows names of sentence-transformers.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._after_import import after_import
from spmdzero.backend import current
from spmdzero.data._lengths import Padding
from spmdzero.integrations import _lengths
from spmdzero.integrations._replaced import in_place_of

# A model's padding knows which lengths `encode` has had.
_paddings: weakref.WeakKeyDictionary[Any, Padding] = weakref.WeakKeyDictionary()


def follow_imports() -> None:
    """Has models of sentence-transformers that an engine trains embed texts of few lengths."""
    after_import("sentence_transformers.base.losses.gradcache", _keep_columns)
    after_import("sentence_transformers.base.model", _pad_encoded)
    after_import("sentence_transformers.base.data_collator", _name_tokenizer)


def settle(model: Any) -> None:
    """Has `model` choose now what it would choose when it is first saved or evaluated.

    It keeps the choice in attributes, and a module with more of them is traced anew.
    """
    if "sentence_transformers" in sys.modules:
        getattr(model, "similarity_fn_name", None)


def _keep_columns(caching: Any) -> None:
    @in_place_of(caching, "_create_minibatch")
    def cut(
        original: Callable[..., dict[str, Any]], features: dict[str, Any], begin: int, end: int
    ) -> dict[str, Any]:
        part = original(features, begin, end)
        if _lengths.choice() not in (None, "off"):
            # They are masked, so that an embedding is the same with them.
            for key, value in part.items():
                if isinstance(value, torch.Tensor) and value.dim() > 1:
                    whole = features[key]
                    if value.shape[1] < whole.shape[1]:
                        part[key] = whole[begin:end]
        return part


def _pad_encoded(models: Any) -> None:
    @in_place_of(models.BaseModel, "__call__")
    def embed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        # A forward of the engine has what its loader has padded.
        if args and self in _lengths.models and not current().in_region():
            padding = _paddings.get(self)
            if padding is None:
                padding = _lengths.padding_by_config(self, model=self)
            if padding is not None:
                _paddings[self] = padding
                args = (padding(args[0]), *args[1:])
        return original(self, *args, **kwargs)


def _name_tokenizer(collators: Any) -> None:
    # Padding looks for a collator's tokenizer, which says how many positions there are.
    def tokenizer(self: Any) -> Any:
        return getattr(getattr(self.preprocess_fn, "__self__", None), "tokenizer", None)

    collators.BaseDataCollator.tokenizer = property(tokenizer)
