"""`TopKGate`: which experts a token goes to, and with what weight.

Source: DeepSpeed 0.19.8, moe/sharded_moe.py; GShard, arXiv 2006.16668, algorithm 1. Shapes below
are of s tokens, e experts, k choices, and c places of an expert.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routes(NamedTuple):
    """Routes of tokens to experts.

    Attributes:
        l_aux: the loss that balances experts, 0-dim.
        capacity: c, the same for each batch of a shape.
        experts: `[k, s]`, -1 where a token found no place.
        places: `[k, s]`, the place in the expert's buffer.
        weights: `[k, s]` fp32.
        counts: `[e]`, tokens that chose each expert.
    """

    l_aux: Tensor
    capacity: int
    experts: Tensor
    places: Tensor
    weights: Tensor
    counts: Tensor


class TopKGate(nn.Module):
    """A linear gate in fp32 that chooses one, two or more experts for each token.

    Args:
        model_dim: width of a token.
        num_experts: e.
        k: the choices of a token.
        capacity_factor, eval_capacity_factor: an expert has places for so many times its share of
            the tokens of a device, in training and in evaluation.
        min_capacity: but for so many at least.
        noisy_gate_policy: ``"RSample"`` (k of 1) or ``"Jitter"`` adds noise in training.
        drop_tokens: false gives each expert places for all tokens. DeepSpeed has as many as the
            fullest expert needs, with the same results; a compiled program has one shape.
        use_rts: with k of 1, whether tokens that find no place are chosen at random.
        ep_group: has no effect: a device's tokens meet all experts there.
        top2_2nd_expert_sampling: with k of 2, whether the second expert is drawn.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: object = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        """The routes of tokens `[s, model_dim]`; `used_token` `[s]` is 0 where one goes nowhere."""
        wide = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            wide = wide * torch.empty_like(wide).uniform_(1 - 1e-2, 1 + 1e-2)
        logits = F.linear(wide, self.wg.weight.float())
        if self.k == 1:
            return self._one(logits, used_token)
        return self._two(logits) if self.k == 2 else self._several(logits)

    def _capacity(self, logits: Tensor, share: int) -> int:
        tokens, experts = logits.shape
        if not self.drop_tokens:
            return tokens
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # DeepSpeed multiplies in fp32, where 1.1 * 10 is above 11 and is rounded to 11.
        wanted = np.ceil(np.float32(tokens / experts) * np.float32(factor * share))
        return max(int(wanted), self.min_capacity)

    def _one(self, logits: Tensor, used: Tensor | None) -> Routes:
        experts, gates = logits.shape[1], F.softmax(logits, dim=1)
        noisy = self.noisy_gate_policy == "RSample" and self.training
        chosen = torch.argmax(logits + _gumbel(logits) if noisy else gates, dim=1)
        mask = F.one_hot(chosen, experts).to(gates.dtype)
        if used is not None:
            mask = mask * used.to(mask.dtype).unsqueeze(1)
        counts, capacity = mask.sum(0).detach().long(), self._capacity(logits, 1)
        l_aux = (gates.mean(0) * mask.mean(0)).sum() * experts
        if self.drop_tokens:
            order = mask * torch.rand_like(mask) if self.use_rts else mask
            first = torch.topk(order, k=min(capacity, len(order)), dim=0).indices
            mask = mask * torch.zeros_like(mask).scatter(0, first, torch.ones_like(mask))
        places = ((torch.cumsum(mask, 0) - 1) * mask).sum(1)
        kept = mask.sum(1) > 0
        weights = (gates * mask).sum(1)
        return _routes(l_aux, capacity, [chosen], [kept], [places], [weights], counts)

    def _two(self, logits: Tensor) -> Routes:
        experts, gates = logits.shape[1], F.softmax(logits, dim=1)
        first = torch.argmax(gates, dim=1)
        mask1 = F.one_hot(first, experts).to(gates.dtype)
        drawn = logits + _gumbel(logits) if self.top2_2nd_expert_sampling else logits
        second = torch.argmax(drawn.masked_fill(mask1.bool(), -math.inf), dim=1)
        mask2 = F.one_hot(second, experts).to(gates.dtype)
        places1 = torch.cumsum(mask1, 0) - 1
        # Second choices come after all first ones.
        places2 = torch.cumsum(mask2, 0) - 1 + mask1.sum(0, keepdim=True)
        l_aux = (gates.mean(0) * mask1.mean(0)).mean() * experts * experts
        counts, capacity = (mask1 + mask2).sum(0).detach().long(), self._capacity(logits, 2)
        if self.drop_tokens:
            mask1 = mask1 * (places1 < capacity)
            mask2 = mask2 * (places2 < capacity)
        weights = [(gates * mask).sum(1) for mask in (mask1, mask2)]
        whole = (weights[0] + weights[1]).clamp(min=torch.finfo(gates.dtype).eps)
        return _routes(
            l_aux, capacity, [first, second],
            [mask1.sum(1) > 0, mask2.sum(1) > 0],
            [(places1 * mask1).sum(1), (places2 * mask2).sum(1)],
            [weight / whole for weight in weights], counts,
        )  # fmt: skip

    def _several(self, logits: Tensor) -> Routes:
        (tokens, experts), gates = logits.shape, F.softmax(logits, dim=1)
        best, chosen = torch.topk(gates, k=self.k, dim=1)
        mask = torch.zeros_like(gates).scatter(1, chosen, torch.ones_like(best))
        counts, capacity = mask.sum(0).detach().long(), self._capacity(logits, self.k)
        l_aux = (gates.mean(0) * mask.mean(0)).mean() * experts * experts / self.k
        if self.drop_tokens:
            of_chosen = torch.zeros_like(gates).scatter(1, chosen, best)
            first = torch.topk(of_chosen, k=min(capacity, tokens), dim=0, sorted=False).indices
            mask = mask * torch.zeros_like(mask).scatter(0, first, torch.ones_like(mask))
        places = (torch.cumsum(mask, 0) - 1).gather(1, chosen)
        own = gates * mask
        own = own / own.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
        kept, weights = mask.gather(1, chosen) > 0, own.gather(1, chosen)
        return _routes(
            l_aux, capacity, chosen.unbind(1), kept.unbind(1), places.unbind(1),
            weights.unbind(1), counts,
        )  # fmt: skip


def _routes(
    l_aux: Tensor,
    capacity: int,
    chosen: Sequence[Tensor],
    kept: Sequence[Tensor],
    places: Sequence[Tensor],
    weights: Sequence[Tensor],
    counts: Tensor,
) -> Routes:
    experts = torch.stack(list(chosen))
    return Routes(
        l_aux=l_aux,
        capacity=capacity,
        experts=torch.where(torch.stack(list(kept)), experts, torch.full_like(experts, -1)),
        places=torch.stack(list(places)).long(),
        weights=torch.stack(list(weights)),
        counts=counts,
    )


def _gumbel(like: Tensor) -> Tensor:
    """Draws of the Gumbel distribution of location 0 and scale 1."""
    tiny = torch.finfo(like.dtype).tiny
    return -torch.log(-torch.log(torch.rand_like(like).clamp(min=tiny)))
