"""Optimizers that DeepSpeed or torch has and spmdzero does not run, with the alternative."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why an optimizer is refused, and what to use instead."""

    reason: str
    fix: str


_COMPRESSED = Refusal(
    "1-bit optimizers compress messages that the XLA compiler sends, not spmdzero",
    "Use Adam or Lamb; a bf16 run already sends half the bytes.",
)
_ON_THE_HOST = Refusal(
    "the optimizer state is sharded over the devices' memory and never on the host",
    "Use the optimizer of the same name without CPU, at ZeRO stage 1 or 2.",
)
_MUP = Refusal(
    "its learning rates come from base shapes that the mup package writes on the parameters, "
    "and that the move to the devices would lose",
    "Give each width its own parameter group and lr, with Adam, AdamW or SGD.",
)

REFUSED_OPTIMIZERS: dict[str, Refusal] = {
    "onebitadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "cpuadam": _ON_THE_HOST,
    "deepspeedcpuadam": _ON_THE_HOST,
    "deepspeedcpuadagrad": _ON_THE_HOST,
    "deepspeedcpulion": _ON_THE_HOST,
    "muadam": _MUP,
    "muadamw": _MUP,
    "musgd": _MUP,
    "adafactor": Refusal(
        "its state is sums over rows and columns, which a shard of a parameter doesn't hold",
        "Use AdamW, whose state is sharded over all devices.",
    ),
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
    ),
}
"""Name, lower case -> why not. ``torch.optim.muon`` is torch's class; "Muon" is DeepSpeed's."""
