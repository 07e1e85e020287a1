"""Scripts of Trainer that can't run, each a function of the side that it runs on."""

from typing import Any

from transformers import Trainer

from tests.integrations.trainer_setup import CONFIGS, Side, gpt2, texts, train


def offload(side: Side) -> dict[str, Any]:
    """Refused: states on a disk."""
    config = CONFIGS["client"] | {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    }
    return train(Trainer(gpt2(), side.arguments(config), train_dataset=texts()))


def mismatched(side: Side) -> dict[str, Any]:
    """Refused by transformers: a value that is neither "auto" nor that of the arguments."""
    config = CONFIGS["client"] | {"gradient_clipping": 0.5}
    return train(Trainer(gpt2(), side.arguments(config), train_dataset=texts()))


def unshared_rows(side: Side) -> dict[str, Any]:
    """Refused: twelve rows on eight devices."""
    arguments = side.arguments(per_device_train_batch_size=12)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))


def trained_twice(side: Side) -> dict[str, Any]:
    """Refused: a second `train` of one Trainer, which DeepSpeed's engine doesn't outlive either."""
    trainer = Trainer(gpt2(), side.arguments(max_steps=1), train_dataset=texts())
    train(trainer)
    return train(trainer)


def evaluated_first(side: Side) -> dict[str, Any]:
    """Refused by transformers: there is no engine yet."""
    return Trainer(gpt2(), side.arguments(), eval_dataset=texts(27)).evaluate()


def auto_find_batch_size(side: Side) -> dict[str, Any]:
    """Refused."""
    arguments = side.arguments(auto_find_batch_size=True)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))


def cast_to_evaluate(side: Side) -> dict[str, Any]:
    """Refused: fp32 parameters cast to bf16 for an evaluation."""
    config = {key: value for key, value in CONFIGS["client"].items() if key != "bf16"}
    arguments = side.arguments(config, max_steps=1, bf16_full_eval=True)
    trainer = Trainer(gpt2(), arguments, train_dataset=texts(), eval_dataset=texts(27))
    train(trainer)
    return trainer.evaluate()
