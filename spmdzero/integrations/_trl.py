"""TRL: generating at DeepSpeed's stage 3, packed texts as rows that devices share, and refusals.

Only this file knows names of TRL.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmdzero._after_import import after_import
from spmdzero._logging import log_once
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._replaced import in_place_of
from spmdzero.integrations._trainer import arguments_only_read

_IGNORED = -100
_MASK, _POSITIONS = "attention_mask", "position_ids"
_REDIRECTED = (
    "{} computes its loss in the place of the model's forward, where each device has the loss of "
    "its own rows, and would divide it by the tokens of all. {}"
)
_OTHERWISE = "Train by `trl sft` on texts that the teacher has written, or leave DeepSpeed out"


def follow_imports() -> None:
    """Adapts TRL's modules when they are imported."""
    after_import("trl.models.utils", _adapt_models)
    after_import("trl.scripts.utils", _read_before_launch)
    after_import("trl.trainer.sft_trainer", _share_packed_rows)
    after_import("trl.trainer.distillation_trainer", _refuse_distillation)


def _read_before_launch(module: Any) -> None:
    @in_place_of(module.TrlParser, "parse_args_and_config")
    def parse(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        # `trl sft` reads its arguments once to find those of accelerate, which then starts the
        # script with DeepSpeed's switch set.
        if named.get("separate_remaining_strings"):
            with arguments_only_read():
                return original(self, *args, **named)
        return original(self, *args, **named)


def _adapt_models(models: Any) -> None:
    for name in ("remove_hooks", "add_hooks"):

        @in_place_of(models, name)
        def change(original: Callable[[Any], None], model: Any) -> None:
            # DeepSpeed's hooks would gather each layer for each token. Here a copy on the host
            # generates, and there are no hooks.
            if not isinstance(model, ClientEngine):
                original(model)

    @in_place_of(getattr(models, "_ForwardRedirection", None), "__call__")
    def call(
        original: Callable[..., Any], self: Any, wrapper: Any, model: Any, method: Any, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        if isinstance(wrapper, ClientEngine):
            what = getattr(method, "__qualname__", repr(method))
            raise SpmdZeroUsageError(_REDIRECTED.format(what, "Compute it of the model's outputs"))
        return original(self, wrapper, model, method, *more, **named)


def _refuse_distillation(module: Any) -> None:
    @in_place_of(module.DistillationTrainer, "__init__")
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_deepspeed_enabled:
            what = "trl distillation (DistillationTrainer)"
            raise SpmdZeroUsageError(_REDIRECTED.format(what, _OTHERWISE))


class RowsOfTexts:
    """Collates packed texts into a row each, in the place of one row of all, as TRL's own does.

    Devices share rows, and one row of all texts has another length in each batch, which each would
    be a program to compile. Texts of a row see themselves alone by their `position_ids`, and have
    the same labels: loss, gradients and metrics are those of the one row.

    Args:
        collator: TRL's, whose `padding_free` is True.
    """

    def __init__(self, collator: Any) -> None:
        self._collator = dataclasses.replace(collator, padding_free=False, return_position_ids=True)
        # By these rows are padded to few lengths.
        self.pad_token_id = collator.pad_token_id
        self.pad_to_multiple_of = collator.pad_to_multiple_of

    def __call__(self, examples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The batch, int `[rows, length]`: ids, labels, mask; positions too if a row has texts."""
        batch = self._collator(examples)
        # TRL's loss leaves out the first token of each text, which nothing of it predicts.
        batch["labels"][batch[_POSITIONS] == 0] = _IGNORED
        if "seq_lengths" not in examples[0]:
            del batch[_POSITIONS]
        return batch


def _share_packed_rows(sft: Any) -> None:
    kind = sft.DataCollatorForLanguageModeling
    if not {"padding_free", "return_position_ids"} <= {f.name for f in dataclasses.fields(kind)}:
        # A release before these has another way to pack, or none.
        return

    @in_place_of(sft.SFTTrainer, "__init__")
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        collator = self.data_collator
        if self.is_deepspeed_enabled and type(collator) is kind and collator.padding_free:
            self.data_collator = RowsOfTexts(collator)
            log_once(
                "padding_free: texts stay in rows of few lengths, in which each sees itself "
                "alone: one row of all texts can't be shared by devices"
            )

    @in_place_of(sft.SFTTrainer, "compute_loss")
    def compute_loss(
        original: Callable[..., Any], self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        packed = isinstance(self.data_collator, RowsOfTexts) and _POSITIONS in inputs
        # With a mask transformers wouldn't look for texts in positions. It was there for padding.
        mask = inputs.pop(_MASK, None) if packed else None
        before = self._total_train_tokens
        found = original(self, model, inputs, *args, **kwargs)
        if mask is not None and self._total_train_tokens > before:
            # It has counted a single row's.
            self._total_train_tokens = before + int(mask.sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return found
