"""Factors of gradients on their way to the mean (or the sum) over devices."""

import dataclasses

from spmdzero.config import SpmdZeroConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientScaling:
    """The factors around the reduction; as in DeepSpeed, their order decides when fp16 overflows.

    Attributes:
        seed: factor of gradients inside the replica region over the global loss's.
        before: factor of each device's own gradient before the reduction.
        after: factor of the reduced gradient.
    """

    seed: int = 1
    before: float = 1.0
    after: float = 1.0

    @property
    def whole(self) -> float:
        """Factor of a gradient of the global loss that was never in the region."""
        return self.seed * self.before * self.after

    @classmethod
    def from_config(cls, config: SpmdZeroConfig, *, replicas: int) -> "GradientScaling":
        """The factors that the config's reduction keys ask for.

        The keys are `gradient_allreduce_op`, `prescale_gradients`, `gradient_predivide_factor` and
        `zero_optimization.reduce_scatter`.

        Source: DeepSpeed, runtime/zero/stage_1_and_2.py, `average_tensor` and
        `gradient_reduction_w_predivide`; at stage 0 runtime/engine.py, `allreduce_bucket`. In fp32
        and bf16 the orders of a mean differ by less than a rounding, so there the mean is taken
        once, at the loss.
        """
        if config.gradient_allreduce_op == "sum":
            return cls(seed=replicas)
        if not config.fp16.enabled:
            return cls()
        zero = config.zero_optimization
        if config.prescale_gradients or (zero.stage and zero.reduce_scatter):
            return cls(seed=replicas, before=1 / replicas)
        first = config.gradient_predivide_factor
        if zero.stage == 3:
            # It divides by both, and takes the factor back (stage3.py, `__avg_scatter_*_grads`).
            return cls(seed=replicas, before=1 / first / replicas, after=first)
        return cls(seed=replicas, before=1 / first, after=first / replicas)
