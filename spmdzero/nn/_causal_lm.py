"""transformers' causal language models, whose loss takes hidden states instead of logits.

Nothing is imported from transformers: a model is recognised by the names of its attributes.
"""

import contextvars
import functools
import inspect
import logging
import types
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from spmdzero._logging import is_new
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.nn._linear_cross_entropy import linear_cross_entropy

logger = logging.getLogger("spmdzero")
_LOSS, _OWN_LOSS = "ForCausalLMLoss", "loss_function"
# Whether the running model wants its head's input instead of the head's output.
_asked: contextvars.ContextVar[bool] = contextvars.ContextVar("_asked", default=False)


def fuse_causal_lm_losses(module: nn.Module) -> None:
    """Makes transformers' causal language models in `module` compute losses without logits.

    While such a model trains with labels, its head passes its input on, the loss function is
    `linear_cross_entropy`, and the output's logits are None. Otherwise nothing changes.

    Raises:
        SpmdZeroConfigError: there is no such model, or its head or loss is a different one.
    """
    models: list[Any] = [each for each in module.modules() if _is_causal_lm(each)]
    if not models:
        raise _refusal(
            f"{type(module).__name__} is no causal language model of transformers, with a linear "
            "head and its own loss, and holds none"
        )
    for model in models:
        head = model.get_output_embeddings()
        if isinstance(head, _FusedHead):
            continue
        if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
            raise _refusal(
                f"the head of {type(model).__name__} is no plain nn.Linear without hooks"
            )
        if "forward" in vars(model):
            raise _refusal(f"the forward of {type(model).__name__} was replaced by another")
        model.set_output_embeddings(_FusedHead(head))
        model.loss_function = functools.partial(_fused_loss, model.loss_function)
        # Bind a method, which is bound anew in a copy of the model, and keeps forward's signature.
        wrapped = functools.wraps(type(model).forward)(_forward)
        model.forward = types.MethodType(wrapped, model)


def fuses_losses(module: nn.Module) -> bool:
    """Whether `fuse_causal_lm_losses` is for `module`: it holds such a model, with a plain head."""
    models: list[Any] = [each for each in module.modules() if _is_causal_lm(each)]
    heads = [model.get_output_embeddings() for model in models]
    return bool(heads) and all(type(head) is nn.Linear for head in heads)


def _is_causal_lm(module: Any) -> bool:
    # Ask its class: a wrapper, as peft's, answers with the attributes of the wrapped model.
    if not hasattr(type(module), "set_output_embeddings") or not hasattr(type(module), _OWN_LOSS):
        return False
    if module.get_output_embeddings() is None:
        return False
    loss = module.loss_function
    loss = loss.args[0] if isinstance(loss, functools.partial) and loss.args else loss
    return getattr(loss, "__name__", None) == _LOSS


def _refusal(reason: str) -> SpmdZeroConfigError:
    return SpmdZeroConfigError(
        key="spmd.fused_loss",
        value=True,
        reason=reason,
        fix="Leave it out, and call spmdzero.nn.linear_cross_entropy(hidden, weight, labels) in "
        "the model's forward.",
    )


class _FusedHead(nn.Linear):
    """A linear head with the parameters of another head."""

    def __init__(self, head: nn.Linear) -> None:
        # Take over everything, including transformers' notes on the module.
        vars(self).update(vars(head))

    def forward(self, input: torch.Tensor) -> Any:
        """`[..., vocabulary]`, or a `_NoLogits` where the model asks for one."""
        if _asked.get():
            return _NoLogits(input, self.weight, self.bias)
        return super().forward(input)


class _NoLogits:
    """Stands for logits between the head and the loss; only the loss can use it."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_use(f".{name}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        _refuse_use(getattr(func, "__name__", str(func)))


def _refuse_use(what: str) -> NoReturn:
    raise SpmdZeroUsageError(
        f'"spmd": {{"fused_loss": true}}: this model uses its logits ({what}) on the way to its '
        "loss, for example to scale them, and there are none. Leave fused_loss out for it"
    )


def _operator(name: str) -> Any:
    return lambda self, *_: _refuse_use(name)


_OPERATORS = "getitem len iter neg add radd sub rsub mul rmul truediv rtruediv matmul pow"
for _name in _OPERATORS.split(" "):
    setattr(_NoLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(self).forward, self)
    if not self.training:
        return forward(*args, **kwargs)
    if inspect.signature(forward).bind(*args, **kwargs).arguments.get("labels") is None:
        if is_new(("fused_loss", "without labels")):
            logger.warning(
                "spmd.fused_loss: %s trains without labels, so it computes logits as ever",
                type(self).__name__,
            )
        return forward(*args, **kwargs)
    before = _asked.set(True)
    try:
        return _without_logits(forward(*args, **kwargs))
    finally:
        _asked.reset(before)


def _without_logits(output: Any) -> Any:
    if isinstance(output, Mapping):
        return type(output)(
            **{name: value for name, value in output.items() if not isinstance(value, _NoLogits)}
        )
    return tuple(value for value in output if not isinstance(value, _NoLogits))


def _fused_loss(
    own: Any,
    logits: Any,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of transformers' `ForCausalLMLoss`, which is `own`."""
    if not isinstance(logits, _NoLogits):
        more = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
        return own(logits, labels, vocab_size, num_items_in_batch, **more)
    if shift_labels is None:
        # Tokens before n predict n; the last one predicts nothing.
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        logits.hidden,
        logits.weight,
        shift_labels.to(logits.hidden.device),
        bias=logits.bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
