"""A Lightning script, the same lines for Lightning alone and for spmdzero.

`python -m tests.integrations.lightning_loop ROLES '[order, ...]'` prints what each order saw in
each role, as one JSON line. Of the ROLES, with commas between them, ``plain`` is Lightning alone on
one CPU process, ``spmdzero`` all devices of this process. An order is a dict of what differs from
`DEFAULTS`.
"""

import json
import logging
import sys
from typing import Any

import spmdzero.integrations

# Lightning imports transformers, which looks for torch_xla.
spmdzero.integrations.install()

# ruff: noqa: E402
import lightning
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from transformers import GPT2Config, GPT2LMHeadModel

from spmdzero.backend import arrays, counters

LR = 1e-3
DEFAULTS: dict[str, Any] = {
    "rows": 16,
    "steps": 20,
    "gas": 1,
    "stage": 2,
    # A section of the config in place of the stage.
    "zero": None,
    # Whether the model is made in `configure_model`.
    "late": False,
    "clip": 1.0,
    "precision": "32-true",
    "schedule": "step",
    "frozen": False,
    # Rows of the data set: what isn't a multiple of `rows` makes an uneven last batch.
    "data": 64,
    "shuffle": True,
    "validate_every": None,
    # Checkpoints: where one is saved, after how many steps, and which one a run goes on from.
    "folder": None,
    "save_at": None,
    "resume": None,
    # Whether that one is a file of Lightning's own.
    "resumes_file": False,
    # Only evaluates a module that no fit has seen; then fits it, by the same Trainer.
    "evaluates_first": False,
    # What the Trainer is told; the processes are as many as there are.
    "hosts": 1,
    "summary": False,
}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Lit(lightning.LightningModule):
    """A GPT-2 of 2 layers, 64 wide, that logs and measures as people do."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.order, self.model = order, None if order["late"] else gpt2()
        self.accuracy, self.right = MulticlassAccuracy(128, average="micro"), MeanMetric()
        self.losses: list[torch.Tensor] = []
        if order["frozen"]:
            self.model.transformer.wte.requires_grad_(False)
            self.model.transformer.h[0].requires_grad_(False)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = gpt2()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(**batch)
        self.log("loss", out.loss, on_step=True, on_epoch=True, prog_bar=True)
        return out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(**batch)
        guesses, wanted = out.logits.argmax(-1)[:, :-1], batch["labels"][:, 1:]
        self.accuracy(guesses, wanted)
        self.right.update((guesses == wanted).float().mean(1))
        self.losses.append(out.loss)
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log("val_right", self.right)
        self.log("val_loss", out.loss, batch_size=len(wanted))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).logits[:, -1, 0]

    def on_validation_epoch_end(self) -> None:
        self.log("val_highest", torch.stack(self.losses).max())
        self.losses.clear()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR)
        kinds = torch.optim.lr_scheduler
        if self.order["schedule"] == "epoch":
            return [optimizer], [kinds.ExponentialLR(optimizer, 0.9)]
        schedule = kinds.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Watch(lightning.Callback):
    """What a run saw, step by step."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.norm = order, 0.0
        self.seen: dict[str, list[Any]] = {
            name: []
            for name in (
                *("losses", "logged", "norms", "lr", "validated", "compiled", "in parts"),
                "summary",
            )
        }

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._note_parts(trainer, module)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._note_parts(trainer, module)

    def _note_parts(self, trainer: Any, module: Any) -> None:
        if getattr(trainer.strategy, "deepspeed_engine", None) is not None:
            matrices = [p for p in module.parameters() if p.dim() > 1]
            parts = sum(arrays.is_split(p) for p in matrices)
            self.seen["in parts"].append(parts / len(matrices))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        summaries = [c for c in trainer.callbacks if isinstance(c, ModelSummary)]
        self.seen["summary"] = [c._summary(trainer, module).total_parameters for c in summaries]

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen["losses"].append(float(outputs["loss"]))
        self.seen["logged"].append(float(trainer.callback_metrics["loss"]))
        self.seen["lr"].append(trainer.optimizers[0].param_groups[0]["lr"])
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        if engine is not None:
            self.norm = float(engine.get_global_grad_norm() or 0.0)
            self.seen["compiled"].append(counters.compiled()[0])
        self.seen["norms"].append(self.norm)
        if self.order["save_at"] == trainer.global_step:
            trainer.save_checkpoint(f"{self.order['folder']}/{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")}
        self.seen["validated"].append(values)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen["logged"].append(float(trainer.callback_metrics["loss_epoch"]))


def data_of(order: dict[str, Any], *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, each from its own start."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 128, (order["data"], 1), generator=generator)
    ids = (starts + torch.arange(32)) % 128
    return [{"input_ids": row, "labels": row} for row in ids]


def run(role: str, order: dict[str, Any]) -> dict[str, Any]:
    from spmdzero.integrations.lightning import SpmdZeroStrategy

    module, watch = Lit(order), Watch(order)
    config = order["zero"] and {"zero_optimization": order["zero"]}
    told = {"stage": order["stage"], "config": config, "load_full_weights": order["resumes_file"]}
    strategy = "auto" if role == "plain" else SpmdZeroStrategy(**told)
    held_out = DataLoader(data_of(order, seed=2), batch_size=order["rows"])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=order["steps"], max_epochs=-1,
        accumulate_grad_batches=order["gas"], gradient_clip_val=order["clip"],
        precision=order["precision"], val_check_interval=order["validate_every"],
        limit_val_batches=1.0 if order["validate_every"] else 0, num_sanity_val_steps=0,
        callbacks=[watch], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=order["summary"], num_nodes=order["hosts"],
    )  # fmt: skip
    found: dict[str, Any] = {}
    if order["evaluates_first"]:
        found["tested"] = trainer.test(module, held_out, verbose=False)
        found["predicted"] = [rows.tolist() for rows in trainer.predict(module, held_out) or ()]
        found["validated first"] = trainer.validate(module, held_out, verbose=False)
    torch.manual_seed(1)
    loader = DataLoader(data_of(order, seed=1), batch_size=order["rows"], shuffle=order["shuffle"])
    trainer.fit(module, loader, held_out, ckpt_path=order["resume"], weights_only=False)
    seen: dict[str, Any] = watch.seen | found
    if role == "spmdzero":
        engine = trainer.strategy.deepspeed_engine
        seen["folding"] = [engine.capture.replayed + engine.capture.compared, engine.capture.traced]
        seen["rows"] = engine.train_micro_batch_size_per_gpu() * engine.mesh.size
        seen["parameters"] = sum(p.numel() for p in module.parameters())
        seen["dtype"] = str(next(module.parameters()).dtype)
        seen["enabled"] = [engine.spmd_config.bf16.enabled, engine.spmd_config.fp16.enabled]
    return seen


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    roles, orders = sys.argv[1].split(","), json.loads(sys.argv[2])
    print(json.dumps({role: [run(role, DEFAULTS | order) for order in orders] for role in roles}))


if __name__ == "__main__":
    main()
