"""The cross-entropy of a linear head, without the logits of all rows."""

from typing import Any, Literal, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from spmdzero.backend import (
    LABEL,
    IndexRange,
    Product,
    counted_as,
    note_index,
    programs,
    runtime,
)
from spmdzero.backend.forms._order import after
from spmdzero.backend.forms._row_parts import by_device, parts_of_rows
from spmdzero.errors import SpmdZeroUsageError

# Adding a chunk's gradient of the weight to the sum of those before reads and writes 8 bytes per
# element. On a TPU a product over 962 rows (v5e) or 2,240 rows (v6e) takes as long.
_MOST = 2048
_TILE = 128


def chunks(rows: int, chunk: int | None) -> list[slice]:
    """Consecutive slices of `rows`, each of `chunk` rows but the last; None chooses the size.

    It chooses half of the rows in whole tiles of 128, and at most 2,048: measured by libtpu's
    estimate for v5e, GPT-2's head (4,096 rows, 768 x 50,304, bf16) takes 11.6 M cycles and
    505 MB in halves, 12.9 M and 379 MB in quarters, and 19.9 M and 969 MB with its logits.
    """
    if chunk is None:
        half = -(-rows // 2)
        chunk = min(_MOST, -(-half // _TILE) * _TILE)
    return [slice(first, min(first + chunk, rows)) for first in range(0, rows, max(chunk, 1))]


Reduction = Literal["mean", "sum"]
# The scope by which `explain` recognises a loss.
_SCOPE = "cross_entropy"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)`, chunk by chunk over rows.

    A chunk's gradient is computed with its loss, while its logits exist, so that backward only has
    to scale: three matrix products in all, as without chunks (Liger Kernel, arXiv 2410.10989,
    section 3.2). Nothing of shape `[rows, vocabulary]` is kept, except where the gradients are
    themselves differentiated (`create_graph=True`), and so computed again. Gradients are summed
    over chunks in fp32, and scaled in fp32 before they are cast to their tensor's dtype: in fp16
    they don't underflow. Off the CPU the gradient by bf16 logits is rounded as torch's. Where
    devices share rows, each has chunks of its own positions.

    Args:
        hidden: `[..., hidden]`, floating.
        weight: `[vocabulary, hidden]` of the same dtype, of `nn.Linear` or a tied embedding.
        labels: `[...]`, integers below the vocabulary, or `ignore_index`.
        bias: `[vocabulary]`, None for none.
        ignore_index: rows with this label don't count.
        reduction: ``"mean"`` over the labels that count (nan where none does), or ``"sum"``.
        chunk: number of rows at a time; None for half of them, at most 2,048. Where devices share
            rows, so many of each device.

    Returns a scalar: fp32, or fp64 for fp64. It is nan where a label on the devices is out of
    range, because they can't raise; the engine raises `OutOfRangeError` when it next asks them.

    Raises:
    SpmdZeroUsageError: shapes, dtypes or `reduction` that don't fit.
    IndexError: a label on the CPU is out of range, as in `F.cross_entropy`.
    """
    _check(hidden, weight, labels, bias=bias, reduction=reduction, chunk=chunk)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would cast F.linear's inputs so. Autograd knows these casts, and gradients pass
        # them.
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    parts = parts_of_rows(labels)
    if parts > 1:
        hidden = by_device(hidden, parts)
        # Of 64-bit integers no device may take its own: see `backend.jax.axes._rows.cut_later`.
        rows = by_device(labels.to(torch.int32), parts)
        counts = by_device(labels != ignore_index, parts)
    else:
        hidden = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden[None]
        rows, counts = labels.flatten(), labels.flatten() != ignore_index
    # What only looks at a forward, as torch.export and `spmdzero plan` do, has no values.
    if device == "cpu" and not isinstance(labels, FakeTensor):
        _check_range(rows[counts], vocabulary=weight.shape[0])
    note_index(labels, _allowed(weight, ignore_index))
    inputs = (hidden, weight, bias)
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    head = Product(flops=2 * hidden.numel() * len(weight), operands=((hidden,), (weight,)))
    with counted_as(head):
        # TPUs have no 64-bit integers, and no vocabulary needs them.
        made = _SummedLoss.apply(*inputs, rows.to(torch.int32), counts, chunk, needs)
    total = cast(torch.Tensor, made)
    if reduction == "sum":
        return total
    number = counts.sum()
    # Without labels torch's loss is nan, and its gradients are zero.
    mean = total / number.clamp(min=1)
    return torch.where(number > 0, mean, torch.full_like(mean, torch.nan))


def _allowed(weight: torch.Tensor, ignore_index: int) -> IndexRange:
    return IndexRange(what=LABEL, size=len(weight), ignored=ignore_index)


def _is_for_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" or runtime.program_platform() == "CPU"


class _Chunk(NamedTuple):
    """The summed loss of some rows, 0-dim, and its gradient `[..., vocabulary]` by the logits."""

    loss: torch.Tensor
    by_logits: torch.Tensor


class _SummedLoss(torch.autograd.Function):
    """The sum over rows; its gradients are computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        counts: torch.Tensor,
        chunk: int | None,
        needs_gradients: bool,
    ) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False), programs.scope(_SCOPE):
            sums = _Sums(weight, bias, wanted=needs_gradients)
            sums.add_all(hidden, labels, counts, chunk)
            if needs_gradients:
                ctx.chunk = chunk
                inputs = hidden, weight, bias, labels, counts
                ctx.save_for_backward(*inputs, *sums.gradients(like=hidden))
            return sums.loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, counts, *gradients = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The forward's gradients have no graph: compute them again with one, which keeps all
            # logits.
            with torch.autocast(hidden.device.type, enabled=False), programs.scope(_SCOPE):
                sums = _Sums(weight, bias, wanted=True)
                sums.add_all(hidden, labels, counts, ctx.chunk)
                gradients = sums.gradients(like=hidden)
        by_hidden, by_weight, by_bias = gradients
        scaled = (by_hidden * grads[0]).to(hidden.dtype), (by_weight * grads[0]).to(weight.dtype)
        last = None if by_bias is None else (by_bias * grads[0]).to(weight.dtype)
        return *scaled, last, None, None, None, None


class _Sums:
    """The sums over chunks: the loss, and the gradients of weight and bias, all fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wanted: bool) -> None:
        self._weight, self._bias, self._wanted = weight, bias, wanted
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._by_hidden: list[torch.Tensor] = []
        self._by_weight: torch.Tensor | None = None
        self._by_bias: torch.Tensor | None = None
        self.loss = torch.zeros((), dtype=self._wide, device=weight.device)

    def add_all(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        chunk: int | None,
    ) -> None:
        """Adds all rows, `[rows, hidden]` or `[devices, rows, hidden]`, chunk by chunk."""
        for rows in chunks(hidden.shape[-2], chunk):
            self._add(hidden[..., rows, :], labels[..., rows], counts[..., rows])

    def _add(self, hidden: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> None:
        latest = self._by_hidden[-1] if self._by_hidden else None
        if latest is not None and self._by_weight is not None:
            # Otherwise XLA's scheduler computes the logits of all chunks first, and holds them.
            hidden = after(hidden, latest[(0,) * latest.dim()] + self._by_weight[0, 0])
        part = self._chunk(hidden, labels, counts)
        self.loss = self.loss + part.loss
        if not self._wanted:
            return
        by_logits, rows, weight = part.by_logits, hidden.flatten(0, -2), self._weight
        if weight.dtype is torch.bfloat16 and not _is_for_cpu(weight):
            # torch rounds this gradient so, too. A TPU multiplies such numbers in one pass, where
            # it takes three for one factor in fp32, and a GPU has no fast units for these.
            by_logits = by_logits.to(weight.dtype)
        else:
            rows, weight = rows.to(self._wide), weight.to(self._wide)
        by_weight = (by_logits.flatten(0, -2).t() @ rows).to(self._wide)
        self._by_weight = by_weight if self._by_weight is None else self._by_weight + by_weight
        self._by_hidden.append((by_logits @ weight).to(self._wide))
        if self._bias is not None:
            by_bias = part.by_logits.flatten(0, -2).sum(0)
            self._by_bias = by_bias if self._by_bias is None else self._by_bias + by_bias

    def gradients(
        self, *, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The gradients of hidden `[..., hidden]`, weight and bias; `like` is hidden."""
        if self._by_weight is None:
            nothing = torch.zeros_like(self._weight, dtype=self._wide)
            bias = self._bias
            return like.to(self._wide), nothing, None if bias is None else torch.zeros_like(bias)
        return torch.cat(self._by_hidden, -2), self._by_weight, self._by_bias

    def _chunk(self, hidden: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor) -> _Chunk:
        logits = torch.nn.functional.linear(hidden, self._weight, self._bias).to(self._wide)
        # Comparing with all numbers is fused into a pass over the logits that exists anyway; a
        # gather and a scatter are separate operations, slow ones on a TPU.
        numbers = torch.arange(len(self._weight), dtype=torch.int32, device=hidden.device)
        hits = numbers == labels[..., None]
        # It doesn't affect the result, so that a gradient of the gradient can ignore it.
        top = logits.detach().amax(-1, keepdim=True)
        log_sum = (logits - top).exp().sum(-1, keepdim=True).log() + top
        picked = torch.where(hits, logits, 0.0).sum(-1)
        known = (labels >= 0) & (labels < len(self._weight))
        losses = torch.where(known, log_sum[..., 0] - picked, torch.nan)
        by_logits = ((logits - log_sum).exp() - hits.to(self._wide)) * counts[..., None]
        return _Chunk(torch.where(counts, losses, 0.0).sum(), by_logits)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    reduction: str,
    chunk: int | None,
) -> None:
    shapes = (
        f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    )
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise _error(f"{shapes}: it takes [..., hidden] and [vocabulary, hidden]")
    if labels.shape != hidden.shape[:-1]:
        raise _error(f"{shapes}: it takes one label for each row of hidden, not probabilities")
    if labels.dtype not in _INTEGERS:
        raise _error(f"the labels are {labels.dtype}. Give class numbers, such as torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _error(f"the bias has shape {list(bias.shape)}, not [{weight.shape[0]}]")
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if not torch.is_autocast_enabled(hidden.device.type) and len(dtypes) > 1:
        named = " and ".join(sorted(str(dtype) for dtype in dtypes))
        raise _error(
            f"it takes tensors of one dtype, not {named}. Cast one: hidden.to(weight.dtype)"
        )
    if reduction not in ("mean", "sum"):
        raise _error(
            f'reduction={reduction!r} would keep a loss of each row. Write "mean" or "sum"'
        )
    if chunk is not None and chunk < 1:
        raise _error(f"chunk={chunk} is no number of rows. Leave it out")


def _check_range(labels: torch.Tensor, *, vocabulary: int) -> None:
    wrong = labels[(labels < 0) | (labels >= vocabulary)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _error(message: str) -> SpmdZeroUsageError:
    return SpmdZeroUsageError(f"linear_cross_entropy: {message}")
