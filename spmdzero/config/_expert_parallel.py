"""The section ``expert_parallel``, DeepSpeed's AutoEP."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from spmdzero.config._types import Count, DeepSpeedSection, lower

ExpertsPreset = Literal[
    "mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"
]


class ExpertParallelConfig(DeepSpeedSection):
    """DeepSpeed's AutoEP, whose losses are those of devices that have all experts.

    Attributes:
        enabled: whether DeepSpeed would divide the experts of a mixture among its ranks. Here each
            device computes its rows by all experts, none is left out, and at stage 3 they rest as
            shards.
        preset_model: the kind of model; the model's own code routes and computes.
        autoep_size: ranks that would share the experts, which here is the mesh's axis ``fsdp`` at
            stage 3.
        expert_tensor_parallel_size: 1; DeepSpeed 0.19.8 has no other.
        load_balance_coeff: null; DeepSpeed 0.19.8 has no other.
        score_func: "auto", as the model scores its experts; another is set in the model's config.
        score_apply: "auto", where the model applies the scores.
        top_k: "auto", as many experts a token as the model's config says.
        routed_scaling_factor: "auto", that of the model's config.
        route_norm: null, as the model's config says whether scores of a token sum to 1.
        num_expert_groups: null, the groups of the model's config.
        num_limited_groups: null, as many of them a token as the model's config says.
        expert_activation: null, that of the model's experts.
        route_scale: 1, no other factor of the scores than the model's.
        async_split_plan, combine_impl, comm_backend, comm_max_tokens_per_rank, comm_num_sm,
            comm_qp_margin, disable_triton_grouped_mm, expert_pattern, expert_w1, expert_w2,
            expert_w3, gate_up_impl, has_shared_experts, moe_layer_pattern, num_experts_attr,
            router_pattern, row_weighting_impl, shared_experts_gate_pattern,
            shared_experts_pattern, top_k_attr, use_grouped_mm, validate_folding_routing: see
            `NO_MEANING`.
    """

    enabled: bool = False
    preset_model: Annotated[ExpertsPreset | None, BeforeValidator(lower)] = None
    autoep_size: Count = 1
    expert_tensor_parallel_size: Any = 1
    load_balance_coeff: Any = None
    score_func: Any = "auto"
    score_apply: Any = "auto"
    top_k: Any = "auto"
    routed_scaling_factor: Any = "auto"
    route_norm: Any = None
    num_expert_groups: Any = None
    num_limited_groups: Any = None
    expert_activation: Any = None
    route_scale: Any = 1.0
    async_split_plan: Any = False
    combine_impl: Any = "auto"
    comm_backend: Any = "comm"
    comm_max_tokens_per_rank: Any = 0
    comm_num_sm: Any = 12
    comm_qp_margin: Any = 4
    disable_triton_grouped_mm: Any = False
    expert_pattern: Any = None
    expert_w1: Any = None
    expert_w2: Any = None
    expert_w3: Any = None
    gate_up_impl: Any = "separate"
    has_shared_experts: Any = None
    moe_layer_pattern: Any = None
    num_experts_attr: Any = None
    router_pattern: Any = None
    row_weighting_impl: Any = "auto"
    shared_experts_gate_pattern: Any = None
    shared_experts_pattern: Any = None
    top_k_attr: Any = None
    use_grouped_mm: Any = True
    validate_folding_routing: Any = False

    def replaced(self) -> dict[str, Any]:
        """The keys that would have DeepSpeed route or compute other than the model itself does."""
        if not self.enabled:
            return {}
        named = (
            "expert_tensor_parallel_size", "load_balance_coeff", "score_func", "score_apply",
            "top_k", "routed_scaling_factor", "route_norm", "num_expert_groups",
            "num_limited_groups", "expert_activation", "route_scale",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in named}
        fields = type(self).model_fields
        return {name: value for name, value in given.items() if value != fields[name].default}
