"""ms-swift: its loss over the rows of several devices, and its logits.

ms-swift multiplies a model's mean by the share of its labels among those of the step
(`swift/template/base.py`, `Template.compute_sft_loss`). Under DeepSpeed a process has one device,
so that each mean has the weight of its own labels. Here a process has the rows of all of its
devices, and the engine's loss is the mean of the devices' means, which one factor for all of them
doesn't turn into the mean over all labels. So each device weighs its own mean, inside of the
forward. Only this file knows names of ms-swift.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero._after_import import after_import
from spmdzero._logging import log_once
from spmdzero.engine._module_hooks import ModuleHook, object_of
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._replaced import in_place_of

_ITEMS = "num_items_in_batch"
_FACTOR = "outputs.loss = outputs.loss * ((labels[:, 1:] != -100).sum() / num_items_in_batch)"
_IGNORED = -100
# Of ms-swift 4 and of ms-swift 3.
_TRAINERS = ("swift.trainers.seq2seq_trainer", "swift.trainers.trainers")


def follow_imports() -> None:
    """Has devices weigh the means of ms-swift's loss; trainers of other releases are refused."""
    after_import("swift.template.base", _weigh_on_devices)
    after_import("swift.trainers.mixin", _keep_all_logits)
    after_import("swift.dataloader.shard", _count_batches_once)
    for trainers in _TRAINERS:
        after_import(trainers, _refuse_other_releases)


def _is_known(templates: Any) -> bool:
    function = getattr(getattr(templates, "Template", None), "compute_sft_loss", None)
    return function is not None and _FACTOR in inspect.getsource(inspect.unwrap(function))


def _weigh_on_devices(templates: Any) -> None:
    if not _is_known(templates):
        return

    @in_place_of(templates.Template, "compute_sft_loss")
    def compute_sft_loss(
        original: Callable[..., Any],
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
        trainer: Any = None,
    ) -> Any:
        # An evaluation calls the module itself, whose mean is one over all rows.
        on_devices = isinstance(model, ClientEngine) and "labels" in inputs
        if num_items_in_batch is None or not on_devices:
            return original(self, model, inputs, num_items_in_batch, trainer)
        _MeansByLabels.of(model.module)
        return original(self, model, inputs | {_ITEMS: num_items_in_batch}, None, trainer)


def _keep_all_logits(mixins: Any) -> None:
    @in_place_of(mixins.SwiftMixin, "get_use_logits_to_keep")
    def get_use_logits_to_keep(original: Callable[..., bool], self: Any, *args: Any) -> bool:
        # Those of the labels alone are of another number in each batch, each a program to compile;
        # a batch of one row would choose them by a mask.
        if self.is_deepspeed_enabled and self.args.use_logits_to_keep is None:
            log_once(
                "ms-swift would compute the logits of each batch from its first label on, which is "
                "a program to compile for each number of them: all are computed. "
                "--use_logits_to_keep true computes fewer"
            )
            self.args.use_logits_to_keep = False
        return original(self, *args)


def _count_batches_once(loaders: Any) -> None:
    @in_place_of(loaders.BatchSamplerShard, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        # It divides the processes by those that share a batch. Here a process has a loader for all
        # of its devices, and shares no batch.
        original(self, *args, **{**kwargs, "tp_size": 1})


class _MeansByLabels(ModuleHook):
    """Hooks of a module: the loss of a forward is its mean times the share of its labels.

    The share is that among the items that the forward is given as `num_items_in_batch`, which the
    module itself doesn't see. Without them the loss stays as it is, as it does on a copy or a
    pickle of the module.
    """

    def __init__(self) -> None:
        self._items: list[torch.Tensor | None] = []

    @classmethod
    def of(cls, module: nn.Module) -> None:
        """Hooks `module`, once."""
        if not any(isinstance(object_of(hook), cls) for hook in module._forward_hooks.values()):
            hooks = cls()
            module.register_forward_pre_hook(hooks.take, with_kwargs=True)
            module.register_forward_hook(hooks.weigh, with_kwargs=True)

    @property
    def outlived(self) -> bool:
        """True: a new hook does the same."""
        return True

    def take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Takes the items out of a forward's inputs."""
        self._items.append(kwargs.pop(_ITEMS, None))
        return args, kwargs

    def weigh(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Multiplies the loss of a forward that was given items."""
        items = self._items.pop()
        if items is not None:
            count = (kwargs["labels"][:, 1:] != _IGNORED).sum()
            # The mean over no label is no number, and the device adds nothing to the sum.
            output.loss = torch.where(count > 0, output.loss * (count / items), 0.0)
        return output

    def __reduce__(self) -> Any:
        return _MeansByLabels, ()


def _refuse_other_releases(trainers: Any) -> None:
    @in_place_of(trainers.Seq2SeqTrainer, "__init__")
    def make(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_deepspeed_enabled and not _is_known(sys.modules.get("swift.template.base")):
            release = sys.modules["swift"].__version__
            raise SpmdZeroUsageError(
                f"ms-swift {release}: its trainer weighs the loss in another way than 4.6's, "
                "whose loss is known here to be the mean over all labels, also where a process has "
                "the rows of several devices. Install ms-swift 4.6"
            )
