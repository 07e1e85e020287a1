"""A script in which Ctrl-C ends Trainer's loop, and what can be done with its engine afterwards."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tests.integrations.trainer_setup import ROWS, Side, gpt2, texts, weights

STEPS, PRESSED_AT = 8, 5
# In the user's own code between two steps, and wherever the loop is so many seconds later.
SECONDS = (None, 0.0, 0.004, 0.01, 0.02, 0.04, 0.08)


class Watching(TrainerCallback):
    """Notes the weights after each step, and has somebody press Ctrl-C in one of them."""

    def __init__(self, press: Callable[[], None] | None) -> None:
        self.after: dict[int, dict[str, float]] = {}
        self._press = press

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Presses."""
        if self._press is not None and state.global_step == PRESSED_AT:
            self._press()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the weights."""
        if self._press is None:
            self.after[state.global_step] = weights(kwargs["model"])


def interrupted(side: Side) -> dict[str, Any]:
    """What is left after Ctrl-C at each of the moments, beside a run that nobody interrupted."""
    whole = _trainer(side, watching := Watching(None))
    whole.train()
    return {
        "whole": watching.after,
        "runs": [
            _one(side, seconds, str(side.folder / f"at{n}")) for n, seconds in enumerate(SECONDS)
        ],
    }


def _one(side: Side, seconds: float | None, folder: str) -> dict[str, Any]:
    trainer = _trainer(side, Watching(lambda: _press_in(seconds)))
    try:
        trainer.train()
        return {"raised": False}
    except KeyboardInterrupt:
        pass
    engine = trainer.model_wrapped
    found: dict[str, Any] = {"raised": True, "steps": engine.global_steps}
    found["weights"] = weights(trainer.model)
    trainer.save_model(folder)
    engine.zero_grad()
    engine.save_checkpoint(folder)
    found["went on"] = _two_steps(engine)
    engine.load_checkpoint(folder)
    found["after loading"] = weights(trainer.model)
    found["went on again"] = _two_steps(engine)
    return found


def _press_in(seconds: float | None) -> None:
    if seconds is None:
        signal.raise_signal(signal.SIGINT)
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()


def _two_steps(engine: Any) -> dict[str, float]:
    rows = texts(2 * ROWS)
    for batch in (rows[:ROWS], rows[ROWS:]):
        loss = engine(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss
        engine.backward(loss)
        engine.step()
    return weights(engine.module)


def _trainer(side: Side, watching: TrainerCallback) -> Trainer:
    arguments = side.arguments(max_steps=STEPS, logging_steps=100)
    return Trainer(gpt2(), arguments, train_dataset=texts(), callbacks=[watching])
