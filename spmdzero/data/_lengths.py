"""Pads batches of texts to few lengths: each length of rows is a program to compile.

A batch can be padded where its attention mask says what of it is a text. What a mask hides, and
labels of -100, change no loss, no gradient and no metric that leaves them out.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional as F

from spmdzero._logging import log_once
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError

_LEAST = 64
_IDS, _MASK = "input_ids", "attention_mask"
_DECODER = "decoder_"
_IGNORED = -100
# What transformers' and TRL's collators fill with, beside the ids. A key may have a prefix or a
# suffix, as `chosen_input_ids` and `input_ids_chosen`.
_FILLS = {
    _MASK: 0, "labels": _IGNORED, "token_type_ids": 0, "position_ids": 0, "special_tokens_mask": 1,
    "completion_mask": 0, "assistant_masks": 0, "prompt_mask": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths to which rows are padded.

    Attributes:
        given: the lengths, or None for powers of two and halves between them, from 64 on.
        multiple: what automatic lengths are multiples of.
        most: the largest automatic length, which is a model's; None if it isn't known.
    """

    given: tuple[int, ...] | None = None
    multiple: int = 1
    most: int | None = None

    def of(self, length: int) -> int:
        """The length to which rows of `length` positions are padded; `length` if there is none."""
        if self.given is not None:
            return min((one for one in self.given if one >= length), default=length)
        unit = -(-_LEAST // self.multiple) * self.multiple
        power = unit
        while power < length:
            power *= 2
        half = power // 4 * 3
        # Short rows cost little: there is nothing between the two smallest lengths.
        padded = half if half >= length and power > 2 * unit else power
        if self.most is not None and padded > self.most:
            return max(length, self.most)
        return padded


class Padding:
    """Pads the batches of one loader, once they have had two lengths.

    Args:
        lengths: the lengths.
        pad_token_id: what ids are filled with; else what the batch has behind its mask, or 0.
        left: whether a batch whose mask hides nothing is of a tokenizer that pads on the left.
    """

    def __init__(
        self, lengths: Lengths, *, pad_token_id: int | None = None, left: bool = False
    ) -> None:
        self._lengths, self._pad, self._left = lengths, pad_token_id, left
        # The first length of each key of ids, for which a program is compiled already.
        self._first: dict[str, int] = {}

    def __call__(self, batch: Any) -> Any:
        """The batch, padded; the batch itself if it isn't to be, or it can't be known how.

        Args:
            batch: a mapping with `input_ids` and `attention_mask`, int `[rows, length]` on the CPU.
        """
        if not isinstance(batch, MutableMapping) or not any(_IDS in str(key) for key in batch):
            return batch
        texts = _texts_of(batch)
        joined = _of_all_hosts({tuple(masks): length for length, masks in texts.items()})
        if joined is None:
            return batch
        targets = {key: self._target(keys, most) for keys, most in joined for key in keys}
        padded = copy.copy(batch) if texts else batch
        for length, masks in texts.items():
            more = targets[next(iter(masks))] - length
            if more and not self._pad_to(padded, batch, masks, more):
                return batch
        return padded

    def _target(self, keys: Iterable[str], length: int) -> int:
        """The length to which texts of a length are padded, by the keys of their ids."""
        for key in keys:
            self._first.setdefault(key, length)
        known = length in self._first.values()
        # Labels of one length in all batches may be something else than a text.
        listed = self._lengths.given is not None and any(_IDS in key for key in keys)
        return length if known and not listed else self._lengths.of(length)

    def _pad_to(
        self,
        padded: MutableMapping[str, Any],
        batch: Mapping[str, Any],
        masks: Mapping[str, torch.Tensor],
        more: int,
    ) -> bool:
        """Pads what has the length of these masks; returns False where it isn't known how."""
        before = any(bool((mask[:, 0] == 0).any()) for mask in masks.values())
        behind = any(bool((mask[:, -1] == 0).any()) for mask in masks.values())
        left = before or (self._left and not behind)
        if (before and behind) or (left and not any("position_ids" in key for key in batch)):
            # Positions that a model counts from the left would be others.
            log_once(
                "rows of different lengths that are padded on the left, without position_ids: each "
                "length is compiled. Have the collator pad to a multiple (pad_to_multiple_of)"
            )
            return False
        rows, length = next(iter(masks.values())).shape
        for key, value in batch.items():
            if not isinstance(value, torch.Tensor) or length not in value.shape[1:]:
                continue
            known = value.shape == (rows, length) and not value.is_floating_point()
            fill = self._pad_of(value, masks.get(key)) if _IDS in key else _fill_of(key)
            if fill is None or not known:
                log_once(
                    f"rows of different lengths: each length is compiled, as {key!r} "
                    f"{list(value.shape)} has the length too and it isn't known how to fill it. "
                    "Have the collator pad to a multiple (pad_to_multiple_of)"
                )
                return False
            padded[key] = F.pad(value, (more, 0) if left else (0, more), value=fill)
        self._say()
        return True

    def _pad_of(self, ids: torch.Tensor, mask: torch.Tensor | None) -> int:
        if self._pad is None and mask is not None:
            hidden = ids[mask == 0]
            self._pad = int(hidden[0]) if hidden.numel() else None
        return 0 if self._pad is None else self._pad

    def _say(self) -> None:
        given = self._lengths.given
        some = ", ".join(map(str, given or self._some()))
        log_once(
            f"rows of different lengths are padded to few of them, {some}{'' if given else ', ...'}"
            ', so that few programs are compiled; labels are -100 there. "spmd": {"lengths": "off"}'
            " leaves rows as they are"
        )

    def _some(self) -> list[int]:
        found = [self._lengths.of(1)]
        while len(found) < 6:
            following = self._lengths.of(found[-1] + 1)
            if following in (found[-1], found[-1] + 1):
                break
            found.append(following)
        return found


class PadToLengths:
    """A loader whose batches of texts are padded to few lengths.

    As transformers' collators leave them, the batches are mappings with `input_ids` and
    `attention_mask`, int `[rows, length]`; `labels` and other tensors of that shape are padded too,
    with what their collators fill with, so that losses, gradients and masked metrics are those of
    the batch as it was. The first length stays as it is. Rows padded on the left need
    `position_ids`. A batch with a tensor of which it isn't known how to fill it stays as it is.

    Args:
        loader: an iterable of batches on the CPU.
        lengths: the lengths, in any order; None for powers of two and halves between them, from 64
            on. Longer rows stay as they are.
        pad_token_id: what ids are filled with; else what a batch has behind its mask, or 0.

    Raises:
        SpmdZeroUsageError: a length is no positive integer.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        lengths: Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        if lengths is not None and not all(isinstance(n, int) and n > 0 for n in lengths):
            raise SpmdZeroUsageError(
                f"PadToLengths(lengths={list(lengths)}): lengths are numbers of positions, such as "
                "[128, 256, 512]"
            )
        self._loader = loader
        given = None if lengths is None else tuple(lengths)
        self._padding = Padding(Lengths(given=given), pad_token_id=pad_token_id)

    def __len__(self) -> int:
        """Number of batches of the loader."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yields the loader's batches, padded."""
        return map(self._padding, self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def padding_of(
    choice: Literal["auto", "off"] | Sequence[int], collator: Any, *, most: int | None = None
) -> Padding | None:
    """How batches of a client's loader are padded; None where they stay as they are.

    Args:
        choice: the config's `spmd.lengths`.
        collator: the loader's; its tokenizer, if it has one, says more.
        most: the model's number of positions; None if it isn't known.
    """
    if choice == "off":
        return None
    # The Trainer's collator that leaves columns out has the script's.
    collator = getattr(collator, "data_collator", collator)
    names = ("tokenizer", "processing_class", "processor")
    tokenizer = next((one for n in names if (one := getattr(collator, n, None)) is not None), None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    pad = getattr(collator, "pad_token_id", getattr(tokenizer, "pad_token_id", None))
    limits = [getattr(tokenizer, "model_max_length", None), most]
    lengths = Lengths(
        given=None if isinstance(choice, str) else tuple(choice),
        multiple=getattr(collator, "pad_to_multiple_of", None) or 1,
        # Tokenizers that don't know it say 1e30.
        most=min((n for n in limits if isinstance(n, int) and n < 1 << 20), default=None),
    )
    left = getattr(tokenizer, "padding_side", "right") == "left"
    return Padding(lengths, pad_token_id=pad, left=left)


def _texts_of(batch: Mapping[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """Length -> the masks of the texts of that length, by the keys of their ids.

    Texts that a decoder writes have no mask but their labels of -100. It is empty if other ids have
    no mask of their shape.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for ids in [key for key in batch if isinstance(key, str) and _IDS in key]:
        tensors: tuple[Any, Any] = batch[ids], batch.get(ids.replace(_IDS, _MASK))
        if ids.startswith(_DECODER):
            continue
        if not all(map(_is_of_texts, tensors)) or tensors[0].shape != tensors[1].shape:
            return {}
        found.setdefault(tensors[0].shape[1], {})[ids] = tensors[1]
    labels: Any = batch.get("labels")
    if found and _is_of_texts(labels) and labels.shape[1] not in found:
        found[labels.shape[1]] = {"labels": (labels != _IGNORED).long()}
    return found


def _of_all_hosts(own: Mapping[tuple[str, ...], int]) -> list[tuple[frozenset[str], int]] | None:
    """Keys of texts that have one length, with the longest of all hosts, whose rows are one batch.

    Args:
        own: keys whose texts have one length on this host -> that length.

    Returns None where the hosts' batches have other keys, as one without texts.
    """
    hosts = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        hosts = processes.gather_objects(own)
    if len({frozenset(key for keys in host for key in keys) for host in hosts}) > 1:
        log_once("rows of different lengths: hosts have batches of other keys, and pad none")
        return None
    joined: list[tuple[frozenset[str], int]] = []
    # What has one length on any host is padded as one.
    for keys, length in (group for host in hosts for group in host.items()):
        same = [group for group in joined if group[0] & {*keys}]
        joined = [group for group in joined if group not in same]
        joined.append(
            (
                frozenset(keys).union(*(others for others, _ in same)),
                max([length, *(most for _, most in same)]),
            )
        )
    return joined


def _is_of_texts(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == 2
        and tensor.numel() > 0
        and tensor.device.type == "cpu"
        and not tensor.is_floating_point()
    )


def _fill_of(key: str) -> int | None:
    known = [name for name in _FILLS if name in key]
    return _FILLS[max(known, key=len)] if known else None
