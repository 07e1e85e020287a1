"""The optimizers by name: supported ones with their parameters, and refused ones."""

import inspect
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from spmdzero._names import did_you_mean
from spmdzero.config._errors import RefusedValueError
from spmdzero.config._params import class_parameters, is_number
from spmdzero.config._types import Rate, Section


def _two_decays(value: object) -> object:
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in numbers):
        raise RefusedValueError(
            "betas are two numbers from 0 and below 1", fix="Write for example [0.9, 0.999]."
        )
    return value


_Betas = Annotated[Any, AfterValidator(_two_decays)]
# DeepSpeed asks for its truth alone, and real files have "torch_impl".
_Truth = Annotated[bool, BeforeValidator(bool)]


class _Params(Section):
    @model_validator(mode="before")
    @classmethod
    def _clip_elsewhere(cls, params: object) -> object:
        if isinstance(params, dict) and "max_grad_norm" in params:
            raise RefusedValueError(
                "clipping is not a parameter of the optimizer",
                fix="Use the key gradient_clipping of the top level, as in DeepSpeed.",
                at=("max_grad_norm",),
            )
        return params


class _OptimizerParams(_Params):
    lr: Rate = 1e-3


class AdamParams(_OptimizerParams):
    """Parameters of Adam and AdamW; ``torch_adam`` chooses nothing, as there is one Adam."""

    betas: _Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: _Truth = False
    amsgrad: bool = False

    @field_validator("amsgrad")
    @classmethod
    def _no_third_moment(cls, amsgrad: bool) -> bool:
        if amsgrad:
            raise RefusedValueError(
                "AMSGrad is not supported, nor by DeepSpeed's Adam", fix="Write false."
            )
        return amsgrad

    @model_validator(mode="after")
    def _torchs_corrects_the_bias(self) -> "AdamParams":
        if self.torch_adam and not self.bias_correction:
            raise RefusedValueError(
                "torch's Adam, which torch_adam asks for, always corrects the bias",
                fix="Remove torch_adam, or the key.",
                at=("bias_correction",),
            )
        return self


class Adam8bitParams(_OptimizerParams):
    """Parameters of bitsandbytes' Adam8bit, whose decay acts on the weights, as AdamW8bit's."""

    betas: _Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    min_8bit_size: Annotated[int, Field(ge=0)] = 4096


class AdamW8bitParams(Adam8bitParams):
    """Parameters of bitsandbytes' AdamW8bit."""

    weight_decay: Rate = 1e-2


class SGDParams(_OptimizerParams):
    """Parameters of SGD, as in torch.optim.SGD."""

    momentum: Rate = 0.0
    dampening: float = 0.0
    weight_decay: Rate = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum_and_no_dampening(self) -> "SGDParams":
        if self.nesterov and not self.momentum:
            raise RefusedValueError(
                "Nesterov momentum needs a momentum above 0",
                fix="Set momentum, such as 0.9, or nesterov to false.",
                at=("nesterov",),
            )
        if self.nesterov and self.dampening:
            raise RefusedValueError(
                "Nesterov momentum is defined without dampening",
                fix="Set dampening to 0 or nesterov to false.",
                at=("dampening",),
            )
        return self


class AdagradParams(_Params):
    """Parameters of Adagrad, as in torch.optim.Adagrad."""

    lr: Rate = 1e-2
    lr_decay: Rate = 0.0
    weight_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Rate = 1e-10


class LionParams(_OptimizerParams):
    """Parameters of Lion, with FusedLion's defaults."""

    betas: _Betas = (0.9, 0.999)
    weight_decay: Rate = 0.0


class Lion8bitParams(_OptimizerParams):
    """Parameters of bitsandbytes' Lion8bit."""

    lr: Rate = 1e-4
    betas: _Betas = (0.9, 0.99)
    weight_decay: Rate = 0.0
    min_8bit_size: Annotated[int, Field(ge=0)] = 4096


class LambParams(_OptimizerParams):
    """Parameters of Lamb, with FusedLamb's defaults."""

    betas: _Betas = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: Rate = 0.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    max_coeff: Rate = 10.0
    min_coeff: Rate = 0.01


class MuonParams(_Params):
    """Parameters of Muon and of the Adam that trains parameters that are no matrices."""

    lr: Rate | None = None
    muon_lr: Rate | None = None
    adam_lr: Rate | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Rate = 0.0
    ns_method: Literal["gram", "standard"] = "gram"
    betas: _Betas = (0.9, 0.95)
    eps: Rate = 1e-10
    adam_w_mode: bool = True
    torch_adam: _Truth = False
    per_head_muon: _Truth = False


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "Adam8bit": Adam8bitParams,
    "AdamW8bit": AdamW8bitParams,
    "Lion8bit": Lion8bitParams,
    "PagedAdam8bit": Adam8bitParams,
    "PagedAdamW8bit": AdamW8bitParams,
    "PagedLion8bit": Lion8bitParams,
}
"""Name of an optimizer of DeepSpeed 0.19.8, or of bitsandbytes 0.50.2 -> its parameters."""


class Refusal(NamedTuple):
    """Why an optimizer is refused, what to do, and the optimizer by whose parameters to go on."""

    reason: str
    fix: str
    instead: str = "AdamW"


_COMPRESSED = Refusal(
    "1-bit optimizers compress messages that the XLA compiler sends, not spmdzero",
    "Use Adam or Lamb; a bf16 run already sends half the bytes.",
)
_ON_THE_HOST = Refusal(
    "it is a class of DeepSpeed's, which its configs call by the name without DeepSpeedCPU",
    'Write "AdamW" (or "Adam", "Adagrad", "Lion"); "offload_optimizer": {"device": "cpu"} in '
    "zero_optimization has its states rest on the host.",
)
_FUSED = Refusal(
    "it is a class of DeepSpeed's, which its configs call by the name without Fused",
    'Write "AdamW" (or "Adam", "Lamb", "Lion"): the compiler fuses the update anyway.',
)
_MUP = Refusal(
    "its learning rates come from base shapes that the mup package writes on the parameters, "
    "and that the move to the devices would lose",
    "Give each width its own parameter group and lr, with Adam, AdamW or SGD.",
)

REFUSED_OPTIMIZERS: dict[str, Refusal] = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED._replace(instead="Lamb"),
    "zerooneadam": _COMPRESSED,
    "cpuadam": _ON_THE_HOST,
    "deepspeedcpuadam": _ON_THE_HOST,
    "deepspeedcpuadagrad": _ON_THE_HOST._replace(instead="Adagrad"),
    "deepspeedcpulion": _ON_THE_HOST._replace(instead="Lion"),
    "fusedadam": _FUSED,
    "fusedadamw": _FUSED,
    "fusedlamb": _FUSED._replace(instead="Lamb"),
    "fusedlion": _FUSED._replace(instead="Lion"),
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP._replace(instead="SGD"),
    "lbfgs": Refusal(
        "it evaluates the loss several times in one step and needs all parameters as one vector",
        "Use AdamW or SGD.",
    ),
    "sparseadam": Refusal(
        "it takes sparse gradients only, and gradients are dense on a TPU", "Use AdamW."
    ),
    "torch.optim.muon": Refusal(
        "it orthogonalises whole matrices, which its step can't do on a shard",
        'Name Muon in the config: "optimizer": {"type": "Muon"}; its other parameters get Adam.',
        instead="Muon",
    ),
}
"""Lower-case name -> refusal. ``torch.optim.muon`` is torch's class; "Muon" is DeepSpeed's."""


def optimizer_params(name: str) -> type[Section]:
    """The parameters of an optimizer by its canonical name, see `optimizer_name`."""
    found = OPTIMIZERS.get(name)
    return found or class_parameters(_of_torch()[name], without="params")


def optimizer_name(name: str) -> str:
    """The canonical spelling of an optimizer's name; DeepSpeed's names may have any case."""
    canonical = {known.lower(): known for known in OPTIMIZERS}.get(name.lower())
    if canonical:
        return canonical
    if name.lower() in REFUSED_OPTIMIZERS:
        refusal = REFUSED_OPTIMIZERS[name.lower()]
        raise RefusedValueError(refusal.reason, fix=refusal.fix)
    of_torch = _of_torch()
    if name in of_torch:
        return name
    # A suggestion must not be a refused name.
    usable = [known for known in of_torch if known.lower() not in REFUSED_OPTIMIZERS]
    near = did_you_mean(name, [*OPTIMIZERS, *usable])
    raise RefusedValueError(
        "spmdzero has no optimizer of this name",
        fix=f"{near} Use one of {', '.join(OPTIMIZERS)}, or a class of torch.optim.".lstrip(),
    )


def _of_torch() -> dict[str, type]:
    # Imported here, so that a config without a class of torch is read without torch.
    from torch import optim

    base = optim.Optimizer
    return {
        known: cls
        for known, cls in vars(optim).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base
    }
