"""axolotl: what it chooses by the GPU that it finds, where its config names DeepSpeed's.

Without a GPU it trains `bf16: auto` in fp16, and lets kernels for GPUs compute LoRA. Only this file
knows names of axolotl.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from spmdzero._after_import import after_import
from spmdzero._logging import is_new
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.integrations._replaced import in_place_of

logger = logging.getLogger("spmdzero")
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_ATTENTION = "attn_implementation"
# What torch computes with operations of its own; None is transformers' choice, "sdpa".
_COMPUTED = (None, "sdpa", "eager")
# Key -> why it can't be honoured, and what works.
_ON_GPUS = {
    **dict.fromkeys(_KERNELS, ("it is a Triton kernel, for GPUs", "Leave it out: XLA fuses LoRA")),
    "fp8": (
        "torchao computes in it on GPUs",
        'Take `bf16: true`, and "spmd": {"products": {"dtype": "fp8"}} in the DeepSpeed JSON',
    ),
}
_SDPA = "Take `attn_implementation: sdpa`, in which packed texts see themselves alone, too"


def follow_imports() -> None:
    """Has axolotl choose for TPUs, and refuses what asks for a GPU before it prepares data."""
    after_import("axolotl.logging_config", _show_lines)
    after_import("axolotl.monkeypatch.transformers_num_parameters", _count_at_once)
    after_import("axolotl.utils.config", _choose)
    after_import("axolotl.common.datasets", _refuse_before_data)


def _show_lines(module: Any) -> None:
    @in_place_of(module.AxolotlOrWarnErrorFilter, "filter")
    def passes(original: Callable[..., Any], self: Any, record: logging.LogRecord) -> Any:
        # It drops the lines of all others but warnings.
        own = record.name == logger.name and record.levelno >= self.axolotl_level
        return own or original(self, record)


def _count_at_once(module: Any) -> None:
    @in_place_of(module, "patch_num_parameters")
    def patch_num_parameters(original: Callable[[], None]) -> None:
        original()

        @in_place_of(module.ModuleUtilsMixin, "num_parameters")
        def num_parameters(
            count: Callable[..., int],
            self: Any,
            only_trainable: bool = False,
            exclude_embeddings: bool = False,
        ) -> int:
            # It keeps two counts in the model. The second, of the first step, would be a change of
            # the model that was traced, which compiles again.
            if not only_trainable:
                count(self, exclude_embeddings=not exclude_embeddings)
            return count(self, only_trainable, exclude_embeddings)


def _choose(configs: Any) -> None:
    @in_place_of(configs, "validate_config")
    def validate_config(
        original: Callable[..., Any], cfg: Any, capabilities: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not cfg.get("deepspeed"):
            return original(cfg, capabilities, *args, **kwargs)
        if cfg.get("adapter") and all(cfg.get(name) is None for name in _KERNELS):
            # It would turn on those that nobody has set.
            cfg.update(dict.fromkeys(_KERNELS, False))
        if capabilities:
            capabilities = {**capabilities, "bf16": True}
        chosen = original(cfg, capabilities, *args, **kwargs)
        if chosen.get("bf16") == "auto" and not chosen.get("fp16"):
            # TPUs have bf16, and XLA's CPU computes it.
            chosen["bf16"] = True
        return chosen


def _refuse_before_data(module: Any) -> None:
    for name in ("load_datasets", "load_preference_datasets"):

        @in_place_of(module, name)
        def load(original: Callable[..., Any], *args: Any, cfg: Any, **kwargs: Any) -> Any:
            # `axolotl preprocess` computes nothing.
            if cfg.get("deepspeed") and not cfg.get("is_preprocess"):
                refuse_gpus(cfg)
            return original(*args, cfg=cfg, **kwargs)


def refuse_gpus(cfg: Mapping[str, Any]) -> None:
    """Refuses a config of axolotl that asks for what runs on GPUs only.

    Raises:
        SpmdZeroConfigError: names the key.
    """
    for key, (reason, fix) in _ON_GPUS.items():
        if cfg.get(key):
            raise SpmdZeroConfigError(key=key, value=cfg[key], reason=reason, fix=fix)
    if cfg.get(_ATTENTION) not in _COMPUTED:
        reason = "it is a kernel for GPUs"
        raise SpmdZeroConfigError(key=_ATTENTION, value=cfg[_ATTENTION], reason=reason, fix=_SDPA)
    if cfg.get("adapter") and is_new("axolotl's kernels"):
        logger.info("axolotl's own LoRA kernels, which are for GPUs, are off: XLA fuses LoRA")
