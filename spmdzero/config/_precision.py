"""The sections that choose dtypes: ``bf16``, ``fp16``, ``torch_autocast``, ``data_types``."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from spmdzero.config._errors import RefusedValueError
from spmdzero.config._types import Count, DeepSpeedSection, Dtype, Natural, Rate, whole


class Bf16Config(DeepSpeedSection):
    """bf16 parameters and gradients, with fp32 master weights unless they are turned off.

    Attributes:
        enabled: whether parameters are bf16.
        check_grad_overflow: whether a step with a non-finite gradient is skipped.
        immediate_grad_update: has no effect, see `NO_MEANING`.
        bf16_master_weights_and_grads: whether master weights are bf16; allowed only with
            ``bf16_optimizer_states``, as in DeepSpeed without its CPU Adam.
        bf16_optimizer_states: whether the optimizer's states are bf16 too.
    """

    enabled: bool = False
    check_grad_overflow: bool = True
    immediate_grad_update: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False

    @model_validator(mode="after")
    def _masters_and_states_together(self) -> "Bf16Config":
        masters, states = self.bf16_master_weights_and_grads, self.bf16_optimizer_states
        if states and not masters:
            raise RefusedValueError(
                "bf16 optimizer states need bf16 master weights, in DeepSpeed too",
                fix='Write "bf16_master_weights_and_grads": true beside it, or false here.',
                at=("bf16_optimizer_states",),
            )
        if masters and not states:
            raise RefusedValueError(
                "bf16 master weights beside fp32 optimizer states are what only "
                "DeepSpeedCPUAdam trains on",
                fix='Write "bf16_optimizer_states": true beside it, or false here.',
                at=("bf16_master_weights_and_grads",),
            )
        return self


class Fp16Config(DeepSpeedSection):
    """fp16 parameters and gradients, fp32 master weights, and a loss scale.

    The rules are those of DeepSpeed's runtime/precision_config.py and fp16/loss_scaler.py.

    Attributes:
        enabled: whether parameters are fp16.
        auto_cast: whether floating inputs of forward are cast to fp16.
        loss_scale: the loss scale; 0 means a dynamic one.
        initial_scale_power: a dynamic scale starts at 2 to this power.
        loss_scale_window: number of steps without overflow after which a dynamic scale doubles.
        hysteresis: number of overflows since the last refill at which a dynamic scale is first
            halved; without ZeRO each overflow halves it.
        consecutive_hysteresis: whether each step without overflow refills the hysteresis.
        min_loss_scale: the smallest dynamic scale; under ZeRO an overflow at it is an error.
        fp16_master_weights_and_grads: always false, as `load_config` refuses true.
    """

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Rate = 0.0
    # 2**127 is the largest power of two that the fp32 scale can hold.
    initial_scale_power: Annotated[int, BeforeValidator(whole), Field(ge=0, le=127)] = 16
    loss_scale_window: Natural = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Natural = 1
    fp16_master_weights_and_grads: bool = False

    @model_validator(mode="after")
    def _dynamic_scale_is_possible(self) -> "Fp16Config":
        # With a static scale these keys are not read, and real files have any value there.
        if self.enabled and not self.loss_scale:
            for name in ("loss_scale_window", "min_loss_scale"):
                if not getattr(self, name):
                    raise RefusedValueError(
                        "a dynamic loss scale needs a number greater than 0 here",
                        fix='Write 1 or more, or a "loss_scale" other than 0, which is static.',
                        at=(name,),
                    )
        return self


class TorchAutocastConfig(DeepSpeedSection):
    """The forward under torch.autocast, with fp32 parameters.

    Attributes:
        enabled: whether forward runs under torch.autocast.
        dtype: dtype in which autocast computes; None means the device's default.
        lower_precision_safe_modules: paths of module classes whose gradients are reduced in
            ``dtype``, such as "torch.nn.modules.linear.Linear"; None means linear layers and
            convolutions.
    """

    enabled: bool = False
    dtype: Dtype | None = None
    lower_precision_safe_modules: list[str] | None = None


def _auto_or_patterns(value: object) -> object:
    if value != "auto" and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
        raise RefusedValueError(
            'this is neither "auto" nor a list of name patterns',
            fix='Write "auto", or for example ["e_score_correction_bias"].',
        )
    return value


class DataTypesConfig(DeepSpeedSection):
    """Dtypes of the tensors that live between micro-batches.

    Attributes:
        grad_accum_dtype: dtype of the gradient accumulator; None means the parameter's.
        param_dtype: the parameters' dtype, which must be the one of the bf16 and fp16 sections.
        keep_in_fp32_modules: patterns of names of buffers that are cast to fp32 under ``bf16`` and
            ``fp16``, in which * is anything; "auto" takes those that a transformers model names
            itself.
    """

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    keep_in_fp32_modules: Annotated[Any, AfterValidator(_auto_or_patterns)] = "auto"
