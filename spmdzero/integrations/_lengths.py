"""Pads what accelerate's loaders yield to few lengths, as the config's `spmd.lengths` says."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from spmdzero._after_import import after_import
from spmdzero.data._lengths import Padding, padding_of
from spmdzero.integrations._replaced import in_place_of

# accelerate's, and ms-swift's own for training.
_LOADERS = {
    "accelerate.data_loader": ("DataLoaderShard", "DataLoaderDispatcher"),
    "swift.dataloader.shard": ("DataLoaderShard",),
    "swift.dataloader.dispatcher": ("DataLoaderDispatcher",),
}
# A loader's padding knows which lengths it has had, in the epochs before too.
_paddings: weakref.WeakKeyDictionary[Any, Padding] = weakref.WeakKeyDictionary()
# The models that are trained: none has more positions than it has embeddings for.
models: weakref.WeakSet[Any] = weakref.WeakSet()


def heed_positions(model: Any) -> None:
    """Leaves rows within the positions that `model`, a client's, has, if its config says so."""
    models.add(model)


def follow_imports() -> None:
    """Makes accelerate's loaders, which the Trainer's are too, and ms-swift's pad their batches."""
    for module in _LOADERS:
        after_import(module, _pad)


def _pad(module: Any) -> None:
    for name in _LOADERS[module.__name__]:
        # The batches are padded after the loader has put them together: worker processes would
        # each have to know which lengths the others have had.
        @in_place_of(getattr(module, name), "__iter__")
        def iterate(original: Any, self: Any) -> Iterator[Any]:
            padding = _padding(self)
            return original(self) if padding is None else map(padding, original(self))


def _padding(loader: Any) -> Padding | None:
    if loader not in _paddings:
        made = padding_by_config(getattr(loader, "collate_fn", None))
        if made is None:
            return None
        _paddings[loader] = made
    return _paddings[loader]


def padding_by_config(collator: Any, *, model: Any = None) -> Padding | None:
    """How the config has batches padded; None where they stay as they are.

    Args:
        collator: what puts the batches together.
        model: the model that they are for; else any that is trained.
    """
    asked = choice()
    if asked is None:
        return None
    heeded = models if model is None else [model]
    most = min(map(_positions, heeded), default=0)
    return padding_of(asked, collator, most=most or None)


def _positions(model: Any) -> int:
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # GPT-2's name is an alias of the usual one.
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else sys.maxsize


def choice() -> Any:
    """The config's `spmd.lengths`; None where accelerate doesn't train by DeepSpeed."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    plugin = state().deepspeed_plugin if state is not None and state._shared_state else None
    if plugin is None:
        return None
    spmd = plugin.deepspeed_config.get("spmd")
    return spmd.get("lengths", "auto") if isinstance(spmd, dict) else "auto"
