"""A rank of real DeepSpeed that trains a Llama under AutoTP, over two ranks.

`python -m tests.jax_backend.autotp_peer FIRST END [FOLDER]` trains steps FIRST to END, from a
checkpoint in FOLDER if there is one, and prints the losses and the last gradient norm.
"""

import json
import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "USE_TORCH_XLA": "false"}

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "tensor_parallel": {"autotp_size": 2},
}


def main(first: int, end: int, folder: str | None = None) -> None:
    import deepspeed  # pyrefly: ignore[missing-import]

    from tests.jax_backend.test_tensor_axis import batch, llama

    deepspeed.init_distributed("gloo")
    model = llama()
    if folder is not None:
        for parameter in model.parameters():
            parameter.data.zero_()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    if folder is not None:
        engine.load_checkpoint(folder)
    found = []
    for step in range(first, end):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    print(json.dumps([*found, float(engine.get_global_grad_norm())]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
