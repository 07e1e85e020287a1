"""Running a recorded micro-batch again: the host's part of a step, and nothing traced."""

from collections.abc import Iterator, Sequence

import torch

from spmdzero.backend.torch_xla import draw_keys, set_value
from spmdzero.engine._launching import Launching
from spmdzero.engine._programs import Compiled
from spmdzero.engine._record import Record, forms_of
from spmdzero.engine._schedule import require_metrics
from spmdzero.engine._step_end import StepEnd
from spmdzero.state._training import Training
from spmdzero.step._numbers import group_numbers, loss_scale_number, scale_numbers, step_number


def current_state(record: Record) -> list[torch.Tensor] | str:
    """The state that the program of `record` reads, or why it can't be handed to it."""
    tensors = [place.tensor for place in record.places]
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) == len(tensors) and forms_of(present) == record.forms:
        return present
    for place, tensor, form in zip(record.places, tensors, record.forms, strict=True):
        if tensor is None:
            return f"{place.name} is gone"
        if forms_of([tensor]) != [form]:
            return f"{place.name} has another shape, dtype or sharding"
    return present


def replay(
    training: Training,
    record: Record,
    state: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    launching: Launching,
    step_end: StepEnd | None,
    last: bool,
) -> None:
    """One micro-batch, by the program of `record`.

    Args:
        training: whose.
        record: of a micro-batch of this kind.
        state: the `current_state` of the record.
        inputs: the placed inputs of its forward.
        launching: takes note of it.
        step_end: ends it; None where no `engine.step` would.
        last: it is the last of its step.

    Raises:
        ProgramLostError: torch_xla no longer has the program. After this or any other error of
            the start, the engine and the generators are what they were.
    """
    kind = "boundary" if last else "micro"
    if last:
        require_metrics(training.lr_scheduler, {})
    results = start(training, record, [*state, *inputs])
    step = training.counters.global_steps
    launching.note_call()
    launching.programs.launching(step)
    training.losses.append(put(record, results))
    training.gradients.adopt(record.summed)
    training.counters.backwards += 1
    launching.programs.launched(f"captured {kind}", step, Compiled())
    if step_end is not None:
        step_end.end_micro_batch(boundary=last, lr_kwargs={})


def start(
    training: Training, record: Record, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Uploads what the host adds to `sources` and starts the program of `record`.

    Of the host's state only the generator moves, and only if the program was started: `hold.table`
    takes down the same row again when it is asked again.
    """
    generator = torch.get_rng_state()
    try:
        hosts = training.mesh.place_all([*host_numbers(training, record)])
        return record.program.run([*sources, *hosts])
    except BaseException:
        torch.set_rng_state(generator)
        raise


def put(record: Record, results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Puts what the program of `record` returned in its places, but for the loss: returns that."""
    *values, loss = results
    for place, value, rebound in zip(record.outputs, values, record.rebound, strict=True):
        if rebound:
            place.holder[place.key] = value
        else:
            set_value(place.holder[place.key], value)
    return loss


def host_numbers(training: Training, record: Record) -> Iterator[torch.Tensor]:
    """What the host uploads for the program of `record`, in its order."""
    optimizer = training.optimizer
    assert optimizer is not None
    scaler = optimizer.loss_scaler
    for role, count in record.hosts:
        if role == "key":
            yield from draw_keys(count)
        elif role == "step":
            yield step_number(training.counters.global_steps)
        elif role == "numbers":
            yield from group_numbers(optimizer._rules, optimizer.param_groups, optimizer.hold)
        elif role == "loss_scale" and scaler is not None:
            yield loss_scale_number(scaler)
        elif role == "scales" and scaler is not None:
            yield scale_numbers(scaler)
