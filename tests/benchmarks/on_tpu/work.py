"""How much arithmetic a step of a model is, however it is written."""

import dataclasses

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from on_tpu.cases import Case
from on_tpu.torch_models import batch_of, build


def model_flops(case: Case) -> float:
    """Operations of one chip in one step, as `explain` counts them for its MFU.

    They are three times those of the forward's products; of the first layer of images, which are
    data, twice. Nothing that is computed again counts, and of causal attention half, whatever a
    program makes of its mask.
    """
    if case.model == "moe":
        return (
            6 * case.tokens * (_active(case) + case.layers * case.heads * case.size * case.length)
        )
    # A head of its own is no other product, and transformers' module reads values.
    case = dataclasses.replace(case, untied=False)
    model = build(case, fused_loss=False).bfloat16()
    of_images: list[float] = []
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is not None:
        a_place = 2.0 * first.weight[0].numel()
        first.register_forward_hook(lambda _, __, made: of_images.append(a_place * made.numel()))
    with FlopCounterMode(display=False) as counter:
        model(*batch_of(case, devices=1))
    forward = float(counter.get_total_flops())
    if case.model in ("gpt", "llama"):
        # Of queries with keys and of weights with values.
        forward -= 2 * case.rows * case.layers * case.width * case.length**2
    return 3 * forward - sum(of_images)


def _active(case: Case) -> int:
    """Elements of the weights of a mixture of experts that a token is multiplied with."""
    attention = 2 * case.width * case.size * (case.heads + case.kv_heads)
    experts = 3 * case.width * case.inner * case.active + case.width * case.experts
    return case.layers * (attention + experts) + case.vocabulary * case.width
