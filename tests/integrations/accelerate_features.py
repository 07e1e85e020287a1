"""What an accelerate script does beside its loop, on this process's devices.

`python -m tests.integrations.accelerate_features FOLDER name ...` runs the functions of these names
of `FEATURES`, in their order, and prints what each returned as one JSON line. What one writes to
FOLDER another may read, in a process of another number of devices.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integrations.accelerate_loop import (
    DEFAULTS,
    Loop,
    accelerator_of,
    model_of,
    optimizer_of,
    prepare_process,
)  # fmt: skip

ROLE = "spmdzero"


class Counted:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def _loop(**order: Any) -> Loop:
    return Loop(ROLE, DEFAULTS | order)


def _steps(loop: Loop, count: int, *, skip: int = 0) -> list[float]:
    """The losses of so many micro-batches, from the `skip`-th on."""
    batches = iter(loop.accelerator.skip_first_batches(loop.loader, skip))
    before = len(loop.seen["losses"])
    for _ in range(count):
        loop.micro(next(batches))
    return loop.seen["losses"][before:]


_RESUMED = {"gas": 2, "optimizer": "torch", "schedule": "torch", "steps": 10}
# Of so small a model too a parameter is to rest as shards.
STAGE_3 = {
    "stage": 3,
    "zero": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
}


def save_and_resume(folder: Path, **order: Any) -> dict[str, Any]:
    """Goes on after `save_state`, and once more from `load_state`."""
    loop, counted = _loop(**_RESUMED, **order), Counted()
    loop.accelerator.register_for_checkpointing(counted)
    _steps(loop, 6)
    counted.seen = 6
    loop.accelerator.save_state(str(folder / "state"))
    straight = _steps(loop, 6, skip=6)
    weights = _weights(loop)
    loop.accelerator.free_memory()
    again = resume(folder, weights, **order)
    return {"straight": straight, "lr": loop.seen["lr"][-1]} | again


def resume(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, **order: Any
) -> dict[str, Any]:
    """What follows from the state that `save_and_resume` saved, on any number of devices."""
    loop, counted = _loop(**_RESUMED, **order), Counted()
    loop.accelerator.register_for_checkpointing(counted)
    loop.accelerator.load_state(str(folder / "state"))
    resumed = _steps(loop, 6, skip=counted.seen)
    same = weights is not None and all(
        torch.equal(value, weights[name]) for name, value in _weights(loop).items()
    )
    loop.accelerator.free_memory()
    return {"resumed": resumed, "lr resumed": loop.seen["lr"][-1], "same weights": same}


def _weights(loop: Loop) -> dict[str, torch.Tensor]:
    return loop.accelerator.get_state_dict(loop.model)


def export(folder: Path, **order: Any) -> dict[str, Any]:
    """Every way to the weights: all hold the trained ones."""
    loop = _loop(steps=3, **order)
    loop.train()
    accelerator, weights = loop.accelerator, _weights(loop)
    inner = accelerator.unwrap_model(loop.model)
    inner.save_pretrained(
        folder / "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        # transformers takes them out of it.
        state_dict=dict(weights),
    )
    inner.save_pretrained(folder / "without_dict")
    accelerator.save_model(loop.model, str(folder / "model"))
    torch.save(weights, folder / "weights.pt")
    device = {str(value.device) for value in weights.values()}
    accelerator.free_memory()
    return {"class": type(inner).__name__, "devices": sorted(device)}


def stage_3(folder: Path) -> dict[str, Any]:
    """A model whose parameters rest as shards is saved, resumed and exported."""
    from spmdzero.backend import arrays

    loop = _loop(steps=1, **STAGE_3)
    whole = [n for n, p in loop.model.module.named_parameters() if not arrays.is_split(p)]
    loop.accelerator.free_memory()
    told = {"whole": [name for name in whole if "ln" not in name and "bias" not in name]}
    return told | save_and_resume(folder, **STAGE_3) | export(folder, **STAGE_3)


def without_sync(folder: Path) -> dict[str, Any]:
    """Two micro-batches under `no_sync` by hand: one step, as `accumulate` of two."""
    seen = {}
    for stage in (1, 2):
        accumulated = _loop(stage=stage, gas=2, steps=2)
        accumulated.train()
        accumulated.accelerator.free_memory()
        loop = _loop(stage=stage, gas=2, steps=2)
        losses = []
        for i, batch in enumerate(loop.loader):
            last = i % 2 == 1
            # What `accumulate` does itself.
            loop.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else loop.accelerator.no_sync(loop.model):
                loss = loop.model(**batch).loss
                loop.accelerator.backward(loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            losses.append(loss.item())
        loop.accelerator.free_memory()
        seen[str(stage)] = {"accumulated": accumulated.seen["losses"], "by hand": losses}
    return seen


def steady(folder: Path) -> dict[str, Any]:
    """Transfers to the host and compilations so far: before, and after each of 8 steps.

    The last one of the transfers is after a read by the script.
    """
    from spmdzero.backend import counters

    # Rows that no other run here has, so that something is to be compiled.
    loop = _loop(gas=2, steps=8, rows=24, optimizer="torch", schedule="torch")
    seen = {"reads": [counters.host_reads()], "compiled": [counters.compiled()[0]]}
    for batch in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loss = loop.model(**batch).loss
            loop.accelerator.backward(loss)
            loop.optimizer.step()
            loop.schedule.step()
            loop.optimizer.zero_grad()
        if loop.accelerator.sync_gradients:
            seen["reads"].append(counters.host_reads())
            seen["compiled"].append(counters.compiled()[0])
    assert loss.item() > 0
    seen["reads"].append(counters.host_reads())
    loop.accelerator.free_memory()
    return seen


def collectives(folder: Path) -> dict[str, Any]:
    """gather, reduce and their like, on the engine's outputs and on CPU tensors."""
    loop = _loop(steps=1)
    accelerator, batch = loop.accelerator, next(iter(loop.loader))
    with accelerator.autocast():
        out = loop.model(**batch)
    gathered = accelerator.gather({"loss": out.loss.detach(), "logits": out.logits.detach()})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("once")
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        parts = list(mine)
    seen = {
        "loss": out.loss.item(),
        "gathered loss": gathered["loss"].tolist(),
        "gathered logits": list(gathered["logits"].shape),
        "sum": accelerator.reduce(out.loss.detach(), "sum").item(),
        "mean": accelerator.reduce(torch.tensor([2.0, 4.0]), "mean").tolist(),
        "padded": list(accelerator.pad_across_processes(out.logits.detach(), dim=1).shape),
        "objects": accelerator.gather_for_metrics(["a", "b"]),
        "printed": printed.getvalue(),
        "triggered": accelerator.check_trigger(),
        "parts": parts,
        "processes": accelerator.num_processes,
        "main": accelerator.is_main_process and accelerator.is_local_main_process,
        "device": str(accelerator.device),
        "type": str(accelerator.distributed_type),
    }
    freed = accelerator.free_memory(loop.model, loop.optimizer)
    return seen | {"freed": list(freed), "engine": accelerator.deepspeed_engine_wrapped is None}


def refusals(folder: Path) -> dict[str, Any]:
    """The error of each thing that isn't here."""
    return {what.__name__: _error_of(what) for what in _REFUSED}


def _error_of(what: Callable[[], Any]) -> str:
    try:
        what()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return "no error"


def _with_zero(**zero: Any) -> Loop:
    order = DEFAULTS | {"steps": 1}
    accelerator = accelerator_of(ROLE, order)
    accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"] |= zero
    return Loop(ROLE, order, accelerator)


def _offload() -> None:
    _with_zero(offload_optimizer={"device": "nvme"})


def _two() -> None:
    order = DEFAULTS | {"steps": 1}
    accelerator_of(ROLE, order).prepare(model_of(order), model_of(order))


def _second() -> None:
    loop, order = _loop(steps=1), DEFAULTS | {"steps": 1}
    other = model_of(order)
    model, *_ = loop.accelerator.prepare(other, *optimizer_of(ROLE, order, other))
    loss = model(**next(iter(loop.loader))).loss
    loop.accelerator.backward(loss)


def _plain_backward() -> None:
    loop = _loop(steps=1)
    loop.model(**next(iter(loop.loader))).loss.backward()
    loop.optimizer.step()


def _tensor() -> None:
    order = DEFAULTS | {"steps": 1}
    accelerator = accelerator_of(ROLE, order)
    accelerator.deepspeed_plugin.deepspeed_config |= {
        "tensor_parallel": {"autotp_size": 2}, "spmd": {"mesh": {"fsdp": -1, "tensor": 4}},
    }  # fmt: skip
    Loop(ROLE, order, accelerator)


def _hosts() -> None:
    from spmdzero.integrations._accelerate import require_counted

    _loop(steps=1)
    require_counted(1)
    require_counted(4)


_REFUSED = (_offload, _two, _second, _plain_backward, _tensor, _hosts)
FEATURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    feature.__name__: feature
    for feature in (
        *(save_and_resume, resume, export, stage_3, without_sync, steady, collectives, refusals),
    )
}


def main() -> None:
    prepare_process(ROLE)
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    print(json.dumps({name: FEATURES[name](folder) for name in names}), flush=True)


if __name__ == "__main__":
    main()
