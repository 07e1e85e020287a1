"""What a client's loop adds to a step: transformers' Trainer, accelerate or Lightning.

The client and three calls of an engine train a GPT-2 of transformers in one process and take turns,
step by step. Between two steps of a client's loop stand its callbacks, its logging and its data
loader; they are in its times.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness.workload import CLIP, LEARNING_RATE, ROWS, SIZES, WEIGHT_DECAY, Size

import spmdzero
import spmdzero.integrations.lightning
from spmdzero.backend import counters, runtime
from spmdzero.integrations import install

install()

# After `install`, because these look for deepspeed when they are imported.
import accelerate  # noqa: E402
import lightning  # noqa: E402
import transformers  # noqa: E402

# More than the traces that a fold needs.
WARM_UP = 4
LENGTH = 16
# Steps between two lines of a log, as people have them.
LOGGED = 10
Step = Callable[[], object]


@dataclasses.dataclass
class Clock:
    """Takes the time of steps.

    Attributes:
        host: CPU seconds of the thread that launches.
        whole: seconds until the devices were done.
        compiled: programs.
    """

    host: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)
    compiled: list[int] = dataclasses.field(default_factory=list)
    _began: tuple[float, float, int] = (0.0, 0.0, 0)

    def begin(self) -> None:
        """A step begins."""
        runtime.wait()
        self._began = time.perf_counter(), time.thread_time(), counters.compiled()[0]

    def end(self) -> None:
        """It ends."""
        host = time.thread_time()
        runtime.wait()
        whole, began_host, compiled = self._began
        self.host.append(host - began_host)
        self.whole.append(time.perf_counter() - whole)
        self.compiled.append(counters.compiled()[0] - compiled)


def measure(client: str, model: str, devices: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step of the client and of a bare engine.

    Args:
        client: ``"trainer"``, ``"accelerate"`` or ``"lightning"``.
        model: one of the GPTs of `SIZES`.
        devices: of this process.
        steps: timed ones of each.

    Returns of both ("bare", "client") their medians and the programs that they compiled after the
    third step; of the whole steps the median "ratio" of neighbours, and its "quartiles". "why" is
    the reason that the client's last forward was traced, None if it was folded.
    """
    # A short step shows most of what is added to it.
    size = dataclasses.replace(SIZES[model], sequence=LENGTH)
    mine, its = Clock(), Clock()
    bare = _bare(size, devices)
    run = {"trainer": _trainer, "accelerate": _accelerate, "lightning": _lightning}[client]

    def between() -> None:
        its.end()
        mine.begin()
        next(bare)
        mine.end()
        its.begin()

    why = run(size, WARM_UP + steps, its.begin, between)
    answer: dict[str, Any] = {"why": why}
    for name, clock in (("bare", mine), ("client", its)):
        answer[name] = {
            "host": 1e3 * statistics.median(clock.host[WARM_UP:]),
            "whole": 1e3 * statistics.median(clock.whole[WARM_UP:]),
            "compiled": sum(clock.compiled[3:]),
        }
    pairs = zip(mine.whole[WARM_UP:], its.whole[WARM_UP:], strict=True)
    ratios = sorted(b / a for a, b in pairs)
    quarter = len(ratios) // 4
    return answer | {
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[quarter], ratios[-1 - quarter]],
    }


def _model(size: Size) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=size.vocabulary, n_positions=size.sequence, n_embd=size.width,
            n_layer=size.layers, n_head=size.heads, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _rows(size: Size, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (count, size.sequence), generator=generator)


def _config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
    }


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def _bare(size: Size, devices: int) -> Iterator[torch.Tensor]:
    model = _model(size)
    config = _config() | {"train_micro_batch_size_per_gpu": ROWS // devices}
    engine, *_ = spmdzero.initialize(model=model, optimizer=_adamw(model), config=config)
    for batch in _rows(size, 1000 * ROWS).split(ROWS):
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        yield loss


def _accelerate(size: Size, steps: int, begin: Step, between: Step) -> str | None:
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=_config())
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    model = _model(size)
    data = torch.utils.data.DataLoader(_rows(size, steps * ROWS), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), data)
    begin()
    for step, batch in enumerate(loader):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOGGED == 0:
            loss.item()
        between()
    return model.capture.reason


def _trainer(size: Size, steps: int, begin: Step, between: Step) -> str | None:
    class Turns(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            between()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, deepspeed=_config(), per_device_train_batch_size=ROWS,
            max_steps=steps, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP, logging_steps=LOGGED, save_strategy="no", report_to=[],
            disable_tqdm=True, optim="adamw_torch",
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in _rows(size, steps * ROWS)]
        trainer = transformers.Trainer(
            _model(size), arguments, train_dataset=data, callbacks=[Turns()]
        )
        trainer.train()
    return trainer.deepspeed.capture.reason


class _Module(lightning.LightningModule):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = _model(size)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _adamw(self)


def _lightning(size: Size, steps: int, begin: Step, between: Step) -> str | None:
    class Turns(lightning.Callback):
        def on_train_start(self, *args: Any) -> None:
            begin()

        def on_train_batch_end(self, *args: Any) -> None:
            between()

    module = _Module(size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", strategy="spmdzero", max_steps=steps, gradient_clip_val=CLIP,
            log_every_n_steps=LOGGED, callbacks=[Turns()], default_root_dir=folder,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(_rows(size, steps * ROWS), ROWS))
    return trainer.strategy.model.capture.reason
