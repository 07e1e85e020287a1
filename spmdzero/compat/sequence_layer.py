"""`deepspeed.sequence.layer`: attention of rows that devices share."""

from typing import Any

import torch
from torch import nn

from spmdzero.backend.hosts._row_sharers import RowSharers
from spmdzero.errors import SpmdZeroUsageError

__all__ = ["DistributedAttention"]


class DistributedAttention(nn.Module):
    """Attention of whole rows; the compiler places the all-to-alls of DeepSpeed's class.

    Where `local_attention` calls torch's ``scaled_dot_product_attention``, each device gets whole
    rows of some of the heads. Other attention has its rows gathered.

    Args:
        local_attention: query, key and value of whole rows, all heads -> their context.
        sequence_process_group: the group of `get_sequence_parallel_group`, or None.
        scatter_idx, gather_idx: have no effect: the compiler finds heads and positions itself.
        sp_stream: None, as XLA orders what runs beside what.
        num_kv_heads: has no effect: heads are those of the tensors.

    Raises:
        SpmdZeroUsageError: the group is one of processes; or there is a stream.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: RowSharers | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sequence_process_group, RowSharers | None):
            raise SpmdZeroUsageError(
                f"DistributedAttention(sequence_process_group={sequence_process_group!r}): "
                "processes share no rows, devices of one do. Give it "
                "`deepspeed.utils.groups._get_sequence_parallel_group()`"
            )
        if sp_stream is not None:
            raise SpmdZeroUsageError(
                "DistributedAttention(sp_stream=...): XLA orders what runs beside what, and has "
                "no streams. Leave it out"
            )
        self.local_attn = local_attention

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns `local_attention` of query, key, value and the further arguments.

        Args:
            query: ``[rows, positions, heads, head]``, or with positions first; of whole rows.
            key, value: as `query`, with as many heads or fewer.
            batch_dim_idx: has no effect.
            rotary_pos_emb: None.

        Raises:
            SpmdZeroUsageError: a rotary embedding is given.
        """
        if rotary_pos_emb is not None:
            raise SpmdZeroUsageError(
                "DistributedAttention(...)(rotary_pos_emb=...): query and key have whole rows "
                "before the call. Apply the embedding to them there"
            )
        return self.local_attn(query, key, value, *args, **kwargs)
