"""Trains a byte-level GPT on the Python standard library's source, from a DeepSpeed JSON.

    python examples/train_gpt.py                  about 10 M parameters, under 5 minutes
    python examples/train_gpt.py --size tiny      about 0.4 M parameters, under 1 minute

Without a TPU it runs on 8 virtual CPU devices. On a TPU VM the same command runs on the chips.
"""

import argparse
import gc
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

import spmdzero

HERE = Path(__file__).parent
SIZES = {
    "tiny": GPTConfig(layers=2, heads=4, width=128, window=64),
    "10m": GPTConfig(layers=4, heads=7, width=448, window=128),
}
# The peak learning rates suit the sizes; everything else comes from the JSON.
LEARNING_RATES = {"tiny": 2e-3, "10m": 7e-4}
STEPS = {"tiny": 150, "10m": 70}
READ_EVERY = 5  # steps; reading a value waits for the devices
PROMPTS = ["def __init__(self", "import ", "class ", "    return ", "for ", "    if ", "# ", "try:"]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive stretches of a text: `window` bytes, and the byte that follows each of them."""

    def __init__(self, text: bytes, window: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.window = window

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """int64 [window], int64 [window]."""
        start = index * self.window
        piece = self.bytes[start : start + self.window + 1].long()
        return piece[:-1], piece[1:]


def main() -> None:
    args = parse_arguments()
    # Only the CPU reads the count; a TPU knows how many chips it has.
    os.environ.setdefault("CPU_NUM_DEVICES", str(args.devices))
    size = SIZES[args.size]
    steps = args.steps or STEPS[args.size]
    config = json.loads(Path(args.deepspeed_config).read_text())
    config["optimizer"]["params"]["lr"] = LEARNING_RATES[args.size]
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": steps // 10}

    text = standard_library()
    split = len(text) * 9 // 10
    torch.manual_seed(0)
    engine, _, loader, _ = spmdzero.initialize(
        model=GPT(size),
        training_data=Windows(text[:split], size.window),
        config=config,
    )
    rows = engine.train_micro_batch_size_per_gpu() * engine.plan.mesh.size
    validation = validation_batches(Windows(text[split:], size.window), rows=rows, count=4)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    plan = engine.plan
    say(
        f"A GPT of {parameters / 1e6:.1f} M parameters on {len(text) / 1e6:.0f} MB of Python: ZeRO "
        f"stage {plan.stage} on {plan.mesh.size} {os.environ['PJRT_DEVICE']} devices. The first "
        "steps compile and take longer."
    )
    before = validation_loss(engine, validation)
    losses = train(engine, loader, steps=steps, tokens=engine.train_batch_size() * size.window)
    after = validation_loss(engine, validation)
    say(f"Validation loss in nats per byte: {before:.2f} before training, {after:.2f} after it.")

    say("What the model writes after each prompt:")
    samples = generate(engine, rows=plan.mesh.size, window=size.window, count=args.sample)
    for prompt, continuation in samples:
        print(f"  {prompt!r} -> {continuation!r}")

    say("What crosses the devices in a step's last micro-batch, read from the compiled program:")
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train()
        engine.train_batch()
    print(ledgers.boundary)

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "loss.png"
    draw(losses, picture, title=f"{parameters / 1e6:.1f} M parameters, ZeRO-{plan.stage}")

    del engine, loader
    say("Memory per device at each ZeRO stage, as planned and as measured on live engines:")
    Console().print(memory_table(plan, size=size, config=config))
    say(f"The loss curve is in {picture}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--steps", type=int, help="optimizer steps; the size's own by default")
    parser.add_argument("--sample", type=int, default=60, help="bytes to write after each prompt")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices of the CPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the loss curve")
    spmdzero.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config_zero2.json"))
    return parser.parse_args()


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def standard_library() -> bytes:
    """The top-level modules of Python's own library, one after the other."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def validation_batches(data: Windows, *, rows: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of `rows` windows, spread over the text."""
    stride = len(data) // (rows * count)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(data, range(0, rows * count * stride, stride)), batch_size=rows
    )
    return [tuple(batch) for batch in loader]


def validation_loss(engine: spmdzero.Engine, batches: list[tuple[Tensor, Tensor]]) -> float:
    engine.eval()
    with torch.no_grad():
        return sum(engine(*batch).item() for batch in batches) / len(batches)


def train(engine: spmdzero.Engine, loader, *, steps: int, tokens: int) -> list[float]:
    """Trains for `steps` steps of `tokens` bytes; returns the loss of each."""
    engine.train()
    losses: list[float] = []
    unread: list[Tensor] = []
    batches = loader.endless()
    start = time.perf_counter()
    with tqdm(total=steps, unit="step") as bar:
        for step in range(1, steps + 1):
            unread.append(engine.train_batch(batches))
            if step % READ_EVERY == 0 or step == steps:
                losses += [loss.item() for loss in unread]
                now = time.perf_counter()
                bar.set_postfix(
                    loss=f"{losses[-1]:.2f}",
                    lr=f"{engine.get_lr()[0]:.1e}",
                    norm=f"{engine.get_global_grad_norm():.2f}",
                    tokens_s=f"{len(unread) * tokens / (now - start):.0f}",
                )
                start = now
                unread = []
            bar.update()
    return losses


def generate(
    engine: spmdzero.Engine, *, rows: int, window: int, count: int
) -> list[tuple[str, str]]:
    """(prompt, its continuation by `count` bytes) for `rows` prompts at once.

    The sequence has its full length from the start, so that one program serves every step; the
    zeros after the text are invisible to the bytes before them.
    """
    engine.eval()
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(rows)]
    longest = max(map(len, prompts))
    # Every row ends its prompt at the same place; newlines fill up the shorter ones.
    tokens = torch.zeros(rows, window, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[:longest] = torch.tensor(list(prompt.rjust(longest, "\n").encode()))
    end = min(window, longest + count)
    for position in tqdm(range(longest, end), unit="byte", leave=False):
        with torch.no_grad():
            logits = engine(tokens).cpu()[:, position - 1].float()
        chances = logits.softmax(-1)
        tokens[:, position] = torch.multinomial(chances, 1)[:, 0]
    written = [bytes(row[longest:end].tolist()).decode(errors="replace") for row in tokens]
    return list(zip(prompts, written, strict=True))[: len(PROMPTS)]


def draw(losses: list[float], picture: Path, *, title: str) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def memory_table(plan: spmdzero.ShardingPlan, *, size: GPTConfig, config: dict) -> Table:
    """Megabytes per device of each role at the stages 0, 1 and 2, planned beside measured."""
    reports = []
    for stage, planned in enumerate(plan.compare().stages):
        staged = config | {"zero_optimization": {"stage": stage}}
        engine = spmdzero.initialize(model=GPT(size), config=staged)[0]
        reports += [planned, spmdzero.measure(engine)]
        del engine
        gc.collect()  # before the next engine takes as much memory again
    table = Table("MB per device", title="Between steps, without activations", box=box.SIMPLE_HEAD)
    for stage in range(3):
        table.add_column(f"stage {stage}\nplanned", justify="right")
        table.add_column("\nmeasured", justify="right")
    # A gradient that is not accumulated lives only inside a step.
    kept = [role for role, _ in plan.memory() if role != "gradient"]
    for role in kept:
        table.add_row(role, *(megabytes(report[role]) for report in reports))
    totals = [sum(report[role] for role in kept) for report in reports]
    table.add_section()
    table.add_row("total", *map(megabytes, totals))
    return table


def megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


if __name__ == "__main__":
    main()
