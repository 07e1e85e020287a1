"""The head and the loss of a language model in one module."""

import torch
from torch import nn

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.nn._linear_cross_entropy import Reduction, linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """A linear head with its cross-entropy, which never holds all logits.

    Args:
        hidden: number of input features.
        vocabulary: number of classes.
        bias: whether the head has a bias.
        ignore_index, reduction, chunk: as in `linear_cross_entropy`.

    Attributes:
        weight: `[vocabulary, hidden]`, initialised as in `nn.Linear`.
        bias: `[vocabulary]`, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        *,
        bias: bool = False,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        head = nn.Linear(hidden, vocabulary, bias=bias)
        self.weight, self.bias = head.weight, head.bias
        self.ignore_index, self.reduction, self.chunk = ignore_index, reduction, chunk

    @classmethod
    def around(
        cls,
        head: nn.Linear | nn.Embedding,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk: int | None = None,
    ) -> "LinearCrossEntropy":
        """A module with the parameters of a head, or of an embedding to which the head is tied.

        Raises:
            SpmdZeroUsageError: `head` is neither.
        """
        if not isinstance(head, nn.Linear | nn.Embedding):
            raise SpmdZeroUsageError(
                f"LinearCrossEntropy.around takes an nn.Linear or an nn.Embedding, got "
                f"{type(head).__name__}. Call linear_cross_entropy(hidden, weight, labels) yourself"
            )
        with torch.device("meta"):
            made = cls(
                head.weight.shape[1],
                head.weight.shape[0],
                ignore_index=ignore_index,
                reduction=reduction,
                chunk=chunk,
            )
        made.weight, made.bias = head.weight, getattr(head, "bias", None)
        return made

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of `hidden`, `[..., hidden]`, and `labels`, `[...]`: a scalar.

        Raises:
            SpmdZeroUsageError: shapes or dtypes that don't fit.
        """
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk=self.chunk,
        )
