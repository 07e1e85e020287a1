"""How much arithmetic a step of a model is, however it is written."""

import dataclasses

from torch.utils.flop_counter import FlopCounterMode

from on_tpu.cases import Case
from on_tpu.torch_models import batch_of, build


def model_flops(case: Case) -> float:
    """Operations of one chip in one step: three times those of the forward's products.

    Nothing that is computed again counts, and of causal attention half, whatever a program makes of
    its mask.
    """
    # A head of its own is no other product, and transformers' module reads values.
    case = dataclasses.replace(case, untied=False)
    model = build(case, fused_loss=False).bfloat16()
    with FlopCounterMode(display=False) as counter:
        model(*batch_of(case, devices=1))
    forward = float(counter.get_total_flops())
    if case.model in ("gpt", "llama"):
        # Of queries with keys and of weights with values.
        forward -= 2 * case.rows * case.layers * case.width * case.length**2
    return 3 * forward
