"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: DeepSpeed-Ulysses for transformers' models.

Here the mesh's axis ``sequence`` divides the rows, and the compiler places the all-to-alls around
attention (docs/sequence_axis.md). So the module sees whole rows, and what DeepSpeed's classes cut
and exchange stays as it is.
"""

from collections.abc import Iterator
from typing import Any

# A script that imports this module calls `torch.distributed.nn.functional` without importing it.
import torch.distributed.nn
from torch import nn

from spmdzero.compat import parallel_state_sp
from spmdzero.errors import SpmdZeroUsageError, UsageValueError

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]

_ATTENTION = "sdpa"


class UlyssesSPAttentionHF(nn.Module):
    """Attention of whole rows.

    Args:
        attn: attention as transformers calls it, with query, key and value of shape
            ``[rows, heads, positions, head]``.
        batch_size, attn_head_count, attn_head_size, kv_head_count, num_hidden_layers,
            process_group, seq_length_is_variable, local_seq_length, global_seq_length: have no
            effect: rows aren't cut, so that nothing has to be put together by these numbers.
        disable_in_eval: has no effect: evaluation is computed of whole rows too.
    """

    def __init__(
        self,
        attn: Any,
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn = attn

    def forward(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns what `attn` does."""
        return self.attn(module, query, key, value, attention_mask, *args, **kwargs)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Has `initialize(mpu=...)` let devices share rows; changes nothing in transformers.

        Masks are those that the model makes of whole rows, of padding and of packed documents too;
        DeepSpeed drops them.

        Args:
            model_name_or_path: a model, or the name of one.
            core_attn_implementation: "sdpa".
            sequence_parallel_size: number of devices that share each row.
            micro_batch_size: has no effect: the config says it.
            seq_length, max_length: have no effect but that one is needed where
                `seq_length_is_variable` is False: any length is computed.
            seq_length_is_variable: see `seq_length`.
            disable_in_eval: has no effect: see the class.

        Returns the `mpu` for `initialize`; None if `sequence_parallel_size` is 1.

        Raises:
            UsageValueError: the attention is another one, or the model's is; or the length is
                fixed, and nobody says it.
            SpmdZeroUsageError: another size was given before.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise UsageValueError(
                "register_with_transformers(seq_length_is_variable=False): the length is fixed, "
                "and seq_length doesn't say it. Leave both out: rows of any length are computed"
            )
        config = getattr(model_name_or_path, "config", None)
        of_model = getattr(config, "_attn_implementation", None) or core_attn_implementation
        for said, chosen in (("the call", core_attn_implementation), ("the model", of_model)):
            if chosen != _ATTENTION:
                raise UsageValueError(
                    f"core_attn_implementation={core_attn_implementation!r}: {said} asks for "
                    f"{chosen!r}. Devices share the heads of torch's scaled_dot_product_attention; "
                    f'write core_attn_implementation="{_ATTENTION}", and load the model with '
                    f'attn_implementation="{_ATTENTION}"'
                )
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        return parallel_state_sp


class UlyssesSPDataLoaderAdapter(Iterator[dict[str, Any]]):
    """A loader's batches, whole, with ``shift_labels`` in the place of ``labels``.

    ``shift_labels[..., i]`` is ``labels[..., i + 1]``, and -100 at the end. A call of the engine
    takes ``train_micro_batch_size_per_gpu`` x `engine.dp_world_size` rows, which the loader yields.
    Each batch comes once; DeepSpeed's adapter yields one for each of the ranks that share rows,
    since each has a loader of its own.

    Args:
        dl: yields mappings with ``labels``, of shape ``[rows, positions]``.
        sp_rank, sp_group, sp_world_size, device: have no effect: nothing is cut, and the engine
            uploads.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        self.dl = dl
        self._left: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dl)

    def __iter__(self) -> "UlyssesSPDataLoaderAdapter":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._left is None:
            self._left = iter(self.dl)
        try:
            batch = dict(next(self._left))
        except StopIteration:
            # The next loop over it is the next epoch.
            self._left = None
            raise
        if "labels" not in batch:
            raise SpmdZeroUsageError(
                f"UlyssesSPDataLoaderAdapter: the batch has no labels, but {', '.join(batch)}. "
                "Let the collator make them, or use the loader without the adapter"
            )
        labels = nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)
        return batch | {"shift_labels": labels[..., 1:].contiguous()}
