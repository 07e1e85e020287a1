"""Trains the same numbers by each client of spmdzero's, and prints the losses as JSON.

python -m tests.jax_backend.clients KIND, which is "without torch_xla", "with torch_xla", "tensor",
"tensor, each" or the name of a client

Without torch_xla none is to be found, as where only JAX is installed. With "tensor", pairs of
devices share the weights of a replica. With a client's name, it is imported before spmdzero gives
it a deepspeed, and what it says is printed.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

STEPS, ROWS, LR = 6, 16, 1e-2
MICRO = "train_micro_batch_size_per_gpu"
CLIENTS = ("trainer", "accelerate", "lightning")


class Without:
    """A finder of modules and distributions that knows one package less.

    Args:
        finder: one of `sys.meta_path`.
        package: the one that it doesn't know.
    """

    def __init__(self, finder: Any, package: str) -> None:
        self._finder, self._package = finder, package

    def find_spec(self, fullname: str, *more: Any) -> Any:
        """As the finder's."""
        if fullname.partition(".")[0] == self._package:
            return None
        return self._finder.find_spec(fullname, *more)

    def find_distributions(self, *args: Any) -> Iterable[Any]:
        """As the finder's."""
        found = getattr(self._finder, "find_distributions", lambda *_: ())(*args)
        return [d for d in found if d.metadata["Name"].replace("-", "_") != self._package]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide(package: str) -> None:
    """Has neither an import nor a question for it find the package from now on."""
    assert package not in sys.modules
    sys.meta_path[:] = [Without(finder, package) for finder in sys.meta_path]
    assert importlib.util.find_spec(package) is None
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return
    raise AssertionError(f"the metadata of {package} are found")


class Regression(nn.Module):
    """A model that returns its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error, and what it is of."""
        out = self.body(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def rows() -> list[dict[str, torch.Tensor]]:
    """The data of all steps, in their order."""
    x = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]


def _batches() -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=ROWS)  # pyrefly: ignore[bad-argument-type]


def plain(model: nn.Module, batches: Any) -> list[float]:
    """The losses of a model in torch alone."""
    losses = []
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


PARTITION = {"*body.0.*": "column", "*body.2.weight": "row"}
CONFIG: dict[str, Any] = {
    MICRO: ROWS,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "spmd": {"min_shard_elements": 64},
}


_SPLIT: dict[str, Any] = {"min_shard_elements": 64, "partition": PARTITION}
# The ways to write the same mesh of 8 devices: each axis may take those that are left, and
# DeepSpeed has a key of its own.
PAIRS = [
    CONFIG | {"spmd": _SPLIT, "tensor_parallel": {"autotp_size": 2}},
    CONFIG | {"spmd": _SPLIT | {"mesh": {"fsdp": -1, "tensor": 2}}},
    CONFIG | {"spmd": _SPLIT | {"mesh": {"fsdp": 4, "tensor": -1}}},
]


def assert_mesh(engine: Any, config: Any) -> None:
    """The engine has eight devices, two a replica if the config says how to split weights."""
    assert engine.mesh.size == 8
    assert engine.mesh.spec.tensor == (2 if "partition" in config["spmd"] else 1)


def with_trainer(config: Any = CONFIG) -> list[float]:
    """By transformers' Trainer, in the order of the rows."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows())  # pyrefly: ignore[bad-argument-type]

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, deepspeed=config, per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS, max_steps=STEPS, learning_rate=LR, max_grad_norm=0.0,
            lr_scheduler_type="constant", logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, optim="adamw_torch", remove_unused_columns=False,
        )  # fmt: skip
        found = InOrder(Regression(), arguments, train_dataset=rows(), eval_dataset=rows()[:27])
        found.train()
        assert found.evaluate()["eval_loss"] > 0
        assert_mesh(found.deepspeed, config)
        assert found.deepspeed.train_batch_size() == ROWS
        found.save_model(folder)
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


def with_accelerate(config: Any = CONFIG) -> list[float]:
    """By a loop of accelerate's."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    # transformers' Trainer has made one of its own, with another plugin.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model, losses = Regression(), []
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model, adam, loader = accelerator.prepare(model, adam, _batches())
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    assert_mesh(model, config)
    return losses


def with_lightning(config: Any = None) -> list[float]:
    """By Lightning's Trainer, which counts the rows itself."""
    import logging

    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = Regression(), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Lit()
    strategy: Any = "spmdzero"
    if config is not None:
        from spmdzero.integrations.lightning import SpmdZeroStrategy

        strategy = SpmdZeroStrategy(config={k: v for k, v in config.items() if k != MICRO})
    trainer = lightning.Trainer(
        accelerator="auto", strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, _batches())
    return module.losses


def imported_before(client: str) -> str:
    """What a client says that looked for a deepspeed before there was one."""
    hide("deepspeed")
    module, run = {
        "accelerate": ("accelerate.accelerator", with_accelerate),
        "transformers": ("transformers.trainer", with_trainer),
    }[client]
    importlib.import_module(module)
    from spmdzero.integrations import install

    install()
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def over_pairs(kind: str) -> dict[str, Any]:
    """The losses by each client over pairs of devices, in one or all of the ways to write them."""
    from spmdzero.integrations import install

    install()
    clients: dict[str, Any] = {"trainer": (with_trainer, PAIRS[:1])}
    clients["accelerate"] = (with_accelerate, PAIRS[:1])
    if kind == "tensor, each":
        by_all = (with_trainer, with_accelerate, with_lightning)
        clients = {name: (run, PAIRS) for name, run in zip(CLIENTS, by_all, strict=True)}
    return {"plain": plain(Regression(), _batches())} | {
        name: [train(config) for config in configs] for name, (train, configs) in clients.items()
    }


def trained() -> dict[str, Any]:
    """The losses by each client, and what they were computed with."""
    from spmdzero.backend import current
    from spmdzero.integrations import install

    install()
    found: dict[str, Any] = {
        "plain": plain(Regression(), _batches()),
        "trainer": with_trainer(),
        "accelerate": with_accelerate(),
        "lightning": with_lightning(),
    }
    imported = [n for n, module in sys.modules.items() if module and n.split(".")[0] == "torch_xla"]
    return found | {"backend": current().name, "torch_xla": imported}


def find_only_jax() -> None:
    """As where nothing but JAX is installed, which is taken without being named."""
    hide("torch_xla")
    for name in ("SPMDZERO_BACKEND", "USE_TORCH_XLA"):
        os.environ.pop(name, None)


def main(kind: str) -> None:
    # The tests' own process tells clients to leave torch_xla alone. Here only install() does.
    os.environ.pop("USE_TORCH_XLA", None)
    if kind.startswith("tensor"):
        print(json.dumps(over_pairs(kind)))
        return
    if kind != "with torch_xla":
        find_only_jax()
    print(json.dumps(trained() if kind.endswith("torch_xla") else imported_before(kind)))


if __name__ == "__main__":
    main(*sys.argv[1:])
