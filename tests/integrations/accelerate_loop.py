"""An accelerate training loop, the same lines for plain torch, real DeepSpeed and spmdzero.

`python -m tests.integrations.accelerate_loop ROLES '[order, ...]'` prints what each order saw in
each role, as one JSON line. Of the ROLES, with commas between them, ``plain`` is accelerate alone
on one CPU process, ``deepspeed`` a rank of real DeepSpeed over gloo, ``spmdzero`` all devices of
this process, ``installed`` the same where the name deepspeed is spmdzero's anyway.

An order is a dict of what differs from `DEFAULTS`. `rows` is what one step's micro-batch has in
all: a rank of real DeepSpeed reads its share.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

STEPS, WARMUP, TOTAL, LR = 20, 4, 30, 1e-3
DEFAULTS: dict[str, Any] = {
    "rows": 16,
    "steps": STEPS,
    "gas": 1,
    "stage": 2,
    # More of the config's section.
    "zero": {},
    "precision": "no",
    # More of the config's section.
    "fp16": {},
    # Whose optimizer and schedule: "config", "torch", or "callable" (of the schedule alone).
    "optimizer": "config",
    "schedule": "config",
    "frozen": False,
    # Rows of the data set: what isn't a multiple of `rows` makes an uneven last batch.
    "data": 0,
    "masked": False,
    "evaluate_after": None,
    # "dict", "none" (the plugin's arguments alone), "launched" (neither: what `accelerate launch`
    # was told), or the path of a file.
    "config": "dict",
}


def main() -> None:
    roles, orders = sys.argv[1].split(","), json.loads(sys.argv[2])
    report(roles, orders, run)


def report(
    roles: list[str],
    orders: list[dict[str, Any]],
    run: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> None:
    """Runs the orders in each role and prints what they saw, by role."""
    seen = {}
    for role in roles:
        prepare_process(role)
        seen[role] = [run(role, DEFAULTS | order) for order in orders]
    print(json.dumps(seen), flush=True)
    if "deepspeed" in roles:
        # gloo's and DeepSpeed's threads outlive the interpreter.
        torch.distributed.barrier()
        os._exit(0)


def prepare_process(role: str) -> None:
    """What must be before the first import of accelerate."""
    if role == "installed":
        return
    if role == "spmdzero":
        import spmdzero.integrations

        spmdzero.integrations.install()
        return
    # Both run on torch's CPU, where torch_xla is installed too.
    os.environ["USE_TORCH_XLA"] = "false"
    torch.set_num_threads(1)
    if role == "deepspeed":
        from deepspeed.accelerator import get_accelerator

        # Whether fp16 is fast, is what DeepSpeed asks the CPU; torch computes it on any.
        get_accelerator().is_fp16_supported = lambda: True
        from accelerate.state import DistributedType, PartialState

        # Beside DeepSpeed, accelerate takes no gloo by itself: each rank would be one of one.
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)


def model_of(order: dict[str, Any]) -> Any:
    """A GPT-2 of 2 layers, 64 wide, without dropout; frozen: its first layer isn't trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if order["frozen"]:
        model.transformer.wte.requires_grad_(False)
        model.transformer.h[0].requires_grad_(False)
    return model


def data_of(rows: int, *, masked: bool, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, each from its own start; `masked`: without i % 29 labels."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 128, (rows, 1), generator=generator)
    ids = (starts + torch.arange(32)) % 128
    labels = ids.clone()
    if masked:
        for i, row in enumerate(labels):
            row[: i % 29] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def config_of(order: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config, with what accelerate fills in as "auto"."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": order["gas"],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": order["stage"], "reduce_bucket_size": "auto"}
        | order["zero"],
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8} | order["fp16"],
    }
    if order["optimizer"] == "config":
        params = {"lr": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if order["schedule"] == "config":
        # Numbers, as accelerate divides "auto" by its processes, which are ranks in one and hosts
        # in the other.
        params = {"warmup_min_lr": 0, "warmup_max_lr": LR, "warmup_num_steps": WARMUP}
        params |= {"total_num_steps": TOTAL, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    return config


def factor(step: int) -> float:
    """Of the learning rate after `step` steps: WarmupDecayLR's, which counts from -1."""
    done = max(step - 1, 0)
    return done / WARMUP if done < WARMUP else (TOTAL - done) / (TOTAL - WARMUP)


def accelerator_of(role: str, order: dict[str, Any]) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    if order["config"] == "launched":
        return Accelerator()
    # One run after the other in one process, as accelerate's own tests.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    if role == "plain":
        return Accelerator(
            cpu=True, mixed_precision=order["precision"], gradient_accumulation_steps=order["gas"]
        )
    if order["config"] == "none":
        plugin = DeepSpeedPlugin(
            zero_stage=order["stage"],
            gradient_accumulation_steps=order["gas"],
            gradient_clipping=1.0,
        )
    else:
        config = config_of(order) if order["config"] == "dict" else order["config"]
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(mixed_precision=order["precision"], deepspeed_plugin=plugin)


def optimizer_of(role: str, order: dict[str, Any], model: Any) -> tuple[Any, Any]:
    """The optimizer and the schedule that a script makes before `prepare`."""
    from accelerate.utils import DummyOptim, DummyScheduler

    trained = [p for p in model.parameters() if p.requires_grad]
    if role == "plain" or order["optimizer"] == "torch":
        optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    else:
        optimizer = DummyOptim(trained, lr=LR, weight_decay=0.0)

    def schedule_of(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    if order["schedule"] == "none":
        return optimizer, None
    if role == "plain" or order["schedule"] == "torch":
        return optimizer, schedule_of(optimizer)
    if order["schedule"] == "callable":
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule_of)
    return optimizer, DummyScheduler(optimizer)


def collected(accelerator: Any) -> list[Any]:
    """What collectives return, of a process that may have prepared nothing yet."""
    from accelerate.utils import broadcast_object_list, gather_object

    accelerator.wait_for_everyone()
    tensor = torch.ones(1)
    reduced = accelerator.reduce(tensor, "mean")
    objects = broadcast_object_list(["a"]), gather_object(["b"])
    return [*objects, accelerator.gather(tensor).tolist(), reduced.tolist()]


class Loop:
    """What a script holds after `prepare`, and what it saw."""

    def __init__(self, role: str, order: dict[str, Any], accelerator: Any = None) -> None:
        self.role, self.order = role, order
        self.accelerator = accelerator or accelerator_of(role, order)
        rows = order["rows"] // self.accelerator.num_processes
        count = order["data"] or order["rows"] * order["steps"] * order["gas"]
        data = data_of(count, masked=order["masked"])
        held_out = data_of(order["rows"] * 2 + 5, masked=False, seed=2)
        model = model_of(order)
        optimizer, schedule = optimizer_of(role, order, model)
        loaders = DataLoader(data, batch_size=rows), DataLoader(held_out, batch_size=rows)
        before = collected(self.accelerator)
        prepared = self.accelerator.prepare(model, optimizer, *loaders, schedule)
        self.model, self.optimizer, self.loader, self.held_out, self.schedule = prepared
        self.seen: dict[str, Any] = {"losses": [], "norms": [], "lr": [], "skipped": []}
        self.seen["before"] = before

    def train(self) -> None:
        done = 0
        while done < self.order["steps"]:
            for batch in self.loader:
                self.micro(batch)
                done += self.accelerator.sync_gradients
                if done == self.order["evaluate_after"] and self.accelerator.sync_gradients:
                    self.evaluate()
                if done == self.order["steps"]:
                    break

    def micro(self, batch: dict[str, torch.Tensor]) -> None:
        accelerator, seen = self.accelerator, self.seen
        with accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.optimizer.zero_grad()
        seen["losses"].append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            # accelerate promises a number under DeepSpeed, and a tensor without it.
            assert isinstance(norm, torch.Tensor if self.role == "plain" else float)
            seen["norms"].append(float(norm))
            seen["lr"].append(self.optimizer.param_groups[0]["lr"])
            seen["skipped"].append(bool(accelerator.optimizer_step_was_skipped))

    def evaluate(self) -> None:
        self.model.eval()
        guesses, losses = [], []
        for batch in self.held_out:
            with torch.no_grad():
                out = self.model(**batch)
            guesses.append(self.accelerator.gather_for_metrics(out.logits.argmax(-1)))
            losses.append(self.accelerator.gather(out.loss).mean().item())
        self.model.train()
        guessed = torch.cat(guesses)
        self.seen["rows"], self.seen["guesses"] = len(guessed), guessed[:, ::8].tolist()
        self.seen["eval losses"] = losses


def run(role: str, order: dict[str, Any]) -> dict[str, Any]:
    """What one run saw."""
    loop = Loop(role, order)
    loop.train()
    loop.accelerator.free_memory()
    return loop.seen


if __name__ == "__main__":
    main()
