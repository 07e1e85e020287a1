"""`MoE`: a layer of experts (DeepSpeed 0.19.8, moe/layer.py and moe/sharded_moe.py)."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdzero._logging import log_once
from spmdzero.compat.moe._gate import TopKGate

_POLICIES = (None, "None", "Jitter", "RSample")


class Experts(nn.Module):
    """Copies of one module, each of which gets its part of dim 1."""

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        copies = [copy.deepcopy(expert) for _ in range(num_local_experts)]
        self.deepspeed_experts = nn.ModuleList(copies)
        self.num_local_experts = num_local_experts
        for parameter in self.deepspeed_experts.parameters():
            # `is_moe_param` and the groups of an optimizer ask for these.
            parameter.allreduce = False  # pyrefly: ignore[missing-attribute]
            parameter.group_name = expert_group_name  # pyrefly: ignore[missing-attribute]

    def forward(self, inputs: Tensor) -> Tensor:
        """`[1, e, c, m]` to the same: expert i has `inputs[:, i]`."""
        chunks = inputs.chunk(self.num_local_experts, dim=1)
        made = [expert(chunk) for expert, chunk in zip(self.deepspeed_experts, chunks, strict=True)]
        return torch.cat([out[0] if isinstance(out, tuple) else out for out in made], dim=1)


class MOELayer(nn.Module):
    """Brings tokens to their experts, and what these make of them back."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(
        self, hidden: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted sum of the experts' outputs for tokens `[..., m]`, as of `MoE`.

        It keeps nothing of them: DeepSpeed's attributes `l_aux` and `exp_counts` are what it
        returns.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routes = self.gate(tokens, used_token)
        (count, width), capacity = tokens.shape, routes.capacity
        slots = self.experts.num_local_experts * capacity
        # What found no place goes to one more, which no expert has.
        slot = torch.where(
            routes.experts >= 0,
            routes.experts * capacity + routes.places,
            torch.full_like(routes.experts, slots),
        )
        number = torch.arange(count, device=tokens.device).expand_as(slot)
        nowhere = torch.full((slots + 1,), count, dtype=torch.long, device=tokens.device)
        source = nowhere.scatter(0, slot.reshape(-1), number.reshape(-1))[:-1]
        nothing = tokens.new_zeros(1, width)
        buffer = torch.cat([tokens, nothing]).index_select(0, source)
        made = self.experts(buffer.reshape(1, -1, capacity, width)).reshape(-1, width)
        found = torch.cat([made, nothing]).index_select(0, slot.reshape(-1))
        found = found.reshape(len(slot), count, width)
        # The weights are fp32, and so is the sum.
        total = (found * routes.weights.unsqueeze(-1)).sum(0).to(made.dtype)
        return total.reshape(hidden.shape), routes.l_aux, routes.counts


class MoE(nn.Module):
    """A mixture of experts: returns the output, the balancing loss, and the tokens of each expert.

    Every device has all experts for its tokens, at stage 3 a part of each weight. So no token
    leaves its device, and losses are those of an `ep_size` of 1.

    Args:
        hidden_size: width of a token.
        expert: a module that is copied for each expert.
        num_experts: their number.
        ep_size: must divide it, and has no other effect.
        use_residual: whether the layer is a residual one (arXiv 2201.05596): `expert` itself works
            on each token beside the chosen ones.
        use_tutel, enable_expert_tensor_parallelism: have no effect.
        k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens,
            use_rts, top2_2nd_expert_sampling: see `TopKGate`.

    Raises:
        AssertionError: an `ep_size` that doesn't divide, or an unknown policy.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        assert num_experts % ep_size == 0, (
            f"Number of experts ({num_experts}) should be divisible by expert parallel size "
            f"({ep_size})"
        )
        assert noisy_gate_policy in _POLICIES, f"Unsupported noisy_gate_policy: {noisy_gate_policy}"
        if ep_size > 1:
            log_once(
                f"MoE(ep_size={ep_size}): every device has all {num_experts} experts for its own "
                "tokens, at stage 3 a part of each weight; no token leaves its device"
            )
        self.use_residual, self.ep_size, self.num_experts = use_residual, ep_size, num_experts
        self.num_local_experts = num_experts
        self.expert_group_name = f"ep_size_{ep_size}"
        experts = Experts(expert, num_experts, self.expert_group_name)
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity,
            noisy_gate_policy, drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = MOELayer(gate, experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Does nothing: there are no groups of processes."""

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens `[..., hidden_size]` to the same, the balancing loss 0-dim, and counts `[e]`."""
        output, l_aux, counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            own = self.mlp(hidden_states)
            own = own[0] if isinstance(own, tuple) else own
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + own * share[..., 1:]
        return output, l_aux, counts
