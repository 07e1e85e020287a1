"""The section ``tensor_parallel``, DeepSpeed's AutoTP."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import DeepSpeedSection, Natural, lower

PartitionType = Literal["column", "row", "skip"]
PresetName = Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"]


class LayerSpec(DeepSpeedSection):
    """How weights of some names are split, DeepSpeed's `TPLayerSpec`.

    Attributes:
        patterns: regular expressions that match a parameter's name from its start; the first spec
            that matches counts.
        partition_type: "column" splits what a layer makes, "row" what it takes, "skip" nothing.
        shape: the logical shape of a weight that is several in one; a list within it gives their
            sizes.
        partition_dim: the dim of `shape`, or of the weight, that is split; None for that of the
            type.
        model_types: the values of ``model.config.model_type`` for which it holds; None for all.
        gather_output: has no effect: the compiler gathers what an operation needs whole.
        grad_allreduce: has no effect: the compiler adds up what devices have parts of.
    """

    patterns: list[str]
    partition_type: Annotated[PartitionType, BeforeValidator(lower)] = "column"
    shape: list[int | list[int]] | None = None
    partition_dim: Natural | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    @field_validator("patterns")
    @classmethod
    def _expressions(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise RefusedValueError(
                    f"{pattern!r} is no regular expression: {error}",
                    fix=r"Write it as for Python's re, such as '.*\\.q_proj\\.weight$'.",
                ) from error
        return patterns

    @property
    def way(self) -> str | int:
        """How it splits a weight, see `tensor_dims`; an int is the weight's dim."""
        if self.partition_type == "skip" or self.partition_dim is None:
            return self.partition_type
        if self.shape is None:
            return self.partition_dim
        # What a view has more dims than a weight, which has two, it makes of the weight's first.
        return max(0, self.partition_dim - max(0, len(self.shape) - 2))

    def matches(self, name: str, model_type: str | None) -> bool:
        """Whether it says how the parameter `name` is split."""
        if self.model_types and str(model_type).lower() not in map(str.lower, self.model_types):
            return False
        return any(re.match(pattern, name) for pattern in self.patterns)


class PartitionConfig(DeepSpeedSection):
    """How the weights of a model are split, DeepSpeed's `AutoTPConfig`.

    Attributes:
        use_default_specs: whether those of the preset follow.
        layer_specs: the first that matches a name counts.
    """

    use_default_specs: bool = True
    layer_specs: list[LayerSpec] = Field(default_factory=list)


class TensorParallelConfig(DeepSpeedSection):
    """DeepSpeed's AutoTP.

    Attributes:
        autotp_size: number of devices that share a replica's work, the size of the mesh's axis
            ``tensor``; 0 and 1 turn it off.
        partition_config: how weights are split; without it and `preset_model` as the model of
            transformers itself says.
        preset_model: the name of DeepSpeed's specs for a kind of models.
        dtype, injection_policy_tuple, keep_module_on_host, kernel_inject,
            replace_with_kernel_inject, tensor_parallel, tp, tp_overlap_comm,
            vocab_parallel_ce_backend, vocab_parallel_lm_head: see `NO_MEANING`.
    """

    autotp_size: Natural = 0
    partition_config: PartitionConfig | None = None
    preset_model: Annotated[PresetName | None, BeforeValidator(lower)] = None
    dtype: Any = None
    injection_policy_tuple: Any = None
    keep_module_on_host: bool = False
    kernel_inject: bool = False
    replace_with_kernel_inject: bool = False
    tensor_parallel: dict[str, Any] | None = None
    tp: dict[str, Any] | None = None
    tp_overlap_comm: bool = False
    vocab_parallel_ce_backend: str = "torch"
    vocab_parallel_lm_head: bool | None = None


def _preset(*specs: tuple[str, PartitionType]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(patterns=[rf".*\.{name}\.weight$"], partition_type=kind) for name, kind in specs
    )


_LLAMA = _preset(
    (r"self_attn\.o_proj", "row"),
    (r"self_attn\.[qkv]_proj", "column"),
    (r"mlp\.down_proj", "row"),
    (r"mlp\.(up|gate)_proj", "column"),
)
_FUSED = _preset(
    (r"self_attention\.dense", "row"),
    (r"self_attention\.query_key_value", "column"),
    (r"mlp\.dense_4h_to_h", "row"),
    (r"mlp\.dense_h_to_4h", "column"),
)
PRESETS: dict[str, tuple[LayerSpec, ...]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": _FUSED,
    "chatglm": _FUSED,
    "mixtral": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.[qkv]_proj", "column"),
        (r"block_sparse_moe\.experts\.\d+\.w2", "row"),
        (r"block_sparse_moe\.experts\.\d+\.w[13]", "column"),
        (r"block_sparse_moe\.gate", "skip"),
    ),
    "deepseek_v2": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)", "skip"),
        (r"self_attn\.(q_b_proj|kv_b_proj)", "column"),
        (r"mlp\.(experts\.\d+|shared_experts)\.down_proj", "row"),
        (r"mlp\.(experts\.\d+|shared_experts)\.(up|gate)_proj", "column"),
        (r"mlp\.gate", "skip"),
    ),
    "phi3": _preset(
        (r"self_attn\.o_proj", "row"),
        (r"self_attn\.qkv_proj", "column"),
        (r"mlp\.down_proj", "row"),
        (r"mlp\.gate_up_proj", "column"),
    ),
}
"""Name of DeepSpeed's preset -> its specs (module_inject/autotp_config.py, `AutoTPPresets`)."""
