"""The legs of a run that changes its backend on the way, each in a process of its own.

`SPMDZERO_BACKEND=jax CPU_NUM_DEVICES=4 python -m tests.checkpoint.legs '[leg, ...]'`
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import spmdzero
from spmdzero.formats import TrainingState, open_state
from tests.checkpoint.runs import ROWS, make_model
from tests.checkpoint.test_data_position import Augmented, by_hand, seed_all
from tests.support.backends import VARIABLES
from tests.support.engines import replays
from tests.support.processes import run_module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """What one process does with one run.

    Attributes:
        settings: the config, without the micro-batch size.
        load: folder of the checkpoint that it goes on from; None begins.
        again: folder into which it saves what it has just loaded.
        micro_batches: how many it trains before it saves.
        save: folder into which it saves then.
        deepspeed: folder for the same in DeepSpeed's format, for two ranks.
        after: how many it trains then.
        replayed: by `train_batch`, whose programs are replayed, not by the three calls.
    """

    settings: dict[str, Any]
    load: str | None = None
    again: str | None = None
    micro_batches: int = 0
    save: str | None = None
    deepspeed: str | None = None
    after: int = 0
    replayed: bool = False


Seen = dict[str, Any]


def run_legs(legs: Sequence[Leg], *, backend: str, devices: int) -> list[Seen]:
    """What a new process of that backend sees of each."""
    asked = json.dumps([dataclasses.asdict(leg) for leg in legs])
    told = {"SPMDZERO_BACKEND": backend, **VARIABLES[backend]}
    printed = run_module("tests.checkpoint.legs", asked, devices=devices, **told)
    return json.loads(printed.splitlines()[-1])


def run_leg(leg: Leg, devices: int) -> Seen:
    """Does it in this process."""
    seed_all(3)
    engine, *_ = spmdzero.initialize(
        model=make_model(),
        training_data=Augmented(),
        config=leg.settings | {"train_micro_batch_size_per_gpu": ROWS // devices},
    )
    if leg.load is not None:
        # What was not restored shows in the losses.
        seed_all(99)
        _, client_state = engine.load_checkpoint(leg.load)
        assert client_state["of"] == "a leg"
    if leg.again is not None:
        engine.save_checkpoint(leg.again, tag="again", client_state={"of": "a leg"})

    def save() -> None:
        if leg.save is not None:
            engine.save_checkpoint(leg.save, tag="end", client_state={"of": "a leg"})
        if leg.deepspeed is not None:
            engine.save_deepspeed_checkpoint(
                leg.deepspeed, "end", client_state={"of": "a leg"}, ranks=2
            )

    losses = _train(engine, leg, save)
    return {
        "losses": losses,
        "lr": engine.get_lr(),
        "scale": engine.cur_scale,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "replayed": replays(engine),
    }


def _train(engine: spmdzero.Engine, leg: Leg, save: Callable[[], None]) -> list[float]:
    """The losses, with a save on the way."""
    if leg.replayed:
        count = engine.gradient_accumulation_steps()
        losses = [engine.train_batch().item() for _ in range(leg.micro_batches // count)]
        save()
        return losses + [engine.train_batch().item() for _ in range(leg.after // count)]
    if not leg.micro_batches:
        return []

    def after(done: int) -> None:
        if done == leg.micro_batches:
            save()

    assert engine.training_dataloader is not None
    first = engine.training_dataloader.epoch
    whole = leg.micro_batches + leg.after
    return by_hand(engine, range(first, first + 9), stop=whole, after=after)


def saved(folder: str | Path, tag: str) -> TrainingState:
    """What a leg saved."""
    return open_state(Path(folder), tag)


def differing(first: TrainingState, second: TrainingState) -> list[str]:
    """The tensors and numbers of two states that are not the same in every bit."""
    ours, theirs = (_flat(state) for state in (first, second))
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if not _same(ours.get(name), theirs.get(name))]


def differing_tensors(first: TrainingState, second: TrainingState) -> list[str]:
    """The parameters and optimizer states that are not the same in every bit."""
    names = sorted(first.tensors.keys() | second.tensors.keys())
    both = ({name: state.tensors.get(name) for name in names} for state in (first, second))
    return [
        name
        for name, ours, theirs in zip(names, *(each.values() for each in both), strict=True)
        if ours is None or theirs is None or not _same(ours.whole(), theirs.whole())
    ]


def _flat(state: TrainingState) -> dict[str, Any]:
    found = dict(_leaves("", dataclasses.asdict(state.host)))
    if state.host.accumulation is None:
        # A load between steps counts the micro-batches of a step from there.
        found.pop("counters counted_from", None)
    # The devices' own generator has 64 bits on torch_xla, of which JAX's takes 63.
    found["rng xla"] %= 1 << 63
    return found | {name: tensor.whole() for name, tensor in state.tensors.items()}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name} {key}", part)
    elif isinstance(value, list | tuple) and not all(isinstance(part, int) for part in value):
        for place, part in enumerate(value):
            yield from _leaves(f"{name} {place}", part)
    else:
        yield name.strip(), value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same_form = (first.dtype, first.shape) == (second.dtype, second.shape)
        return same_form and torch.equal(_bits(first), _bits(second))
    return type(first) is type(second) and first == second


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # What overflowed is NaN, of which there are many.
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main() -> None:
    """Does the legs of argv[1] and prints what is seen of them."""
    from spmdzero.backend import runtime

    runtime.start()
    legs = [Leg(**leg) for leg in json.loads(sys.argv[1])]
    print(json.dumps([run_leg(leg, runtime.device_count()) for leg in legs]))


if __name__ == "__main__":
    main()
