"""Trains a GPT on the Python standard library's source, from a DeepSpeed JSON.

    python examples/train_gpt.py                  about 1 M parameters, under 5 minutes
    python examples/train_gpt.py --size tiny      about 0.5 M parameters, about 1 minute

Without a TPU it runs on 8 virtual CPU devices. On a TPU VM the same command runs on the chips.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from source_text import SourceText, Windows
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

import spmdzero
from spmdzero.backend import runtime

HERE = Path(__file__).parent
SIZES = {
    "tiny": GPTConfig(layers=2, heads=4, width=128, window=64, vocabulary=512),
    "small": GPTConfig(layers=4, heads=4, width=128, window=128, vocabulary=1024),
}
# The peak learning rates suit the sizes; everything else comes from the JSON.
LEARNING_RATES = {"tiny": 6e-3, "small": 6e-3}
STEPS = {"tiny": 150, "small": 900}
READ_EVERY = 10  # steps; reading a value waits for the devices
PROMPTS = ["import os\n", "class Reader:", "def find(self,", "    for line in"]
TEMPERATURE = 0.8


def main() -> None:
    args = parse_arguments()
    # Only the CPU reads the count; a TPU knows how many chips it has.
    os.environ.setdefault("CPU_NUM_DEVICES", str(args.devices))
    size = SIZES[args.size]
    steps = args.steps or STEPS[args.size]
    config = json.loads(Path(args.deepspeed_config).read_text())
    config["optimizer"]["params"]["lr"] = LEARNING_RATES[args.size]
    config["scheduler"]["params"] |= {
        "total_num_steps": steps,
        "warmup_num_steps": max(steps // 10, 1),
    }

    text = SourceText.read(vocabulary=size.vocabulary)
    torch.manual_seed(0)
    engine, _, loader, _ = spmdzero.initialize(
        model=GPT(size),
        training_data=Windows(text.trained, size.window),
        config=config,
    )
    rows = engine.train_micro_batch_size_per_gpu() * engine.plan.mesh.size
    validation = validation_batches(Windows(text.held_out, size.window), rows=rows, count=32)
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    plan = engine.plan
    megabytes_of_text = text.bytes_in(text.trained) / 1e6
    say(
        f"A GPT of {parameters / 1e6:.1f} M parameters on {megabytes_of_text:.1f} MB of Python: "
        f"ZeRO stage {plan.stage} on {plan.mesh.size} {runtime.platform()} devices. The "
        "first steps compile and take longer."
    )
    before = validation_loss(engine, validation, text)
    losses = train(engine, loader, steps=steps, tokens=engine.train_batch_size() * size.window)
    after = validation_loss(engine, validation, text)
    say(
        "Validation loss in nats per byte, on files that it wasn't trained on: "
        f"{before:.2f} before training, {after:.2f} after it."
    )

    say("What the model writes after each prompt:")
    for prompt, continuation in write(engine, text, window=size.window, count=args.sample):
        shown = Text(prompt, style="bold").append(continuation, style="not bold")
        Console().print(Panel(shown, title=Text(repr(prompt)), title_align="left"))

    say("What crosses the devices in a step's last micro-batch, read from the compiled program:")
    with spmdzero.record_ledgers(engine) as ledgers:
        engine.train()
        engine.train_batch()
    print(ledgers.boundary)

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "loss.png"
    tokens_per_byte = len(text.trained) / text.bytes_in(text.trained)
    curve = [loss * tokens_per_byte for loss in losses]
    draw(curve, picture, title=f"{parameters / 1e6:.1f} M parameters, ZeRO-{plan.stage}")

    del engine, loader
    say("Memory per device at each ZeRO stage, as planned and as measured on live engines:")
    Console().print(memory_table(size=size, config=config))
    say(f"The loss curve is in {picture}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="optimizer steps; the size's own by default")
    parser.add_argument("--sample", type=int, default=100, help="tokens to write after a prompt")
    parser.add_argument("--devices", type=int, default=8, help="virtual devices of the CPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the loss curve")
    spmdzero.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config_zero2.json"))
    return parser.parse_args()


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def validation_batches(data: Windows, *, rows: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of `rows` windows, spread over the text."""
    stride = len(data) // (rows * count)
    loader = DataLoader(Subset(data, range(0, rows * count * stride, stride)), batch_size=rows)
    return [tuple(batch) for batch in loader]


def validation_loss(
    engine: spmdzero.Engine, batches: list[tuple[Tensor, Tensor]], text: SourceText
) -> float:
    """Nats per byte; the model's loss is nats per token."""
    engine.eval()
    with torch.no_grad():
        nats = sum(engine(*batch).item() * batch[1].numel() for batch in batches)
    return nats / sum(text.bytes_in(targets) for _, targets in batches)


def train(engine: spmdzero.Engine, loader, *, steps: int, tokens: int) -> list[float]:
    """Trains for `steps` steps of `tokens` tokens; returns the loss of each, in nats per token."""
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


def write(
    engine: spmdzero.Engine, text: SourceText, *, window: int, count: int
) -> list[tuple[str, str]]:
    """(prompt, what the model writes after it: up to `count` tokens); says how fast."""
    # The devices share the rows equally: some prompts are written to more than once.
    devices = engine.plan.mesh.size
    rows = -(-len(PROMPTS) // devices) * devices
    prompts = [text.tokenizer.encode(PROMPTS[row % len(PROMPTS)]).ids for row in range(rows)]
    clock = [time.perf_counter()]
    columns = []
    for column in generate(engine, prompts, window=window, count=count):
        columns.append(column)
        clock.append(time.perf_counter())
    written = torch.stack(columns, dim=1)
    later = clock[-1] - clock[1]
    print(
        f"({rows} texts at once: {clock[1] - clock[0]:.1f} s to the first token, which compiles; "
        f"then {1e3 * later / text.bytes_in(written[:, 1:]):.1f} ms a byte)\n"
    )
    return [
        (prompt, text.tokenizer.decode(row.tolist()))
        for prompt, row in zip(PROMPTS, written, strict=False)
    ]


def generate(
    engine: spmdzero.Engine, prompts: list[list[int]], *, window: int, count: int
) -> Iterator[Tensor]:
    """Yields the next token of each prompt, int64 [rows], up to `count` times.

    Ends earlier when the longest row fills the window. The rows have the window's length from the
    start and the positions are data, so one program serves every token; the zeros after a row's
    end are invisible to the tokens before them.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.zeros(len(prompts), window, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for _ in range(min(count, window - int(ends.max()))):
        with torch.no_grad():
            logits = engine(rows, at=ends - 1).cpu().float()
        chances = (logits / TEMPERATURE).softmax(-1)
        column = torch.multinomial(chances, 1, generator=generator)[:, 0]
        rows[torch.arange(len(prompts)), ends] = column
        ends += 1
        yield column


def draw(losses: list[float], picture: Path, *, title: str) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


def memory_table(*, size: GPTConfig, config: dict) -> Table:
    """Megabytes per device of each role at the stages 0 to 3, planned beside measured."""
    reports = []
    for stage in range(4):
        # By default DeepSpeed keeps parameters of up to 100,000 elements whole, most of these.
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        staged = config | {"zero_optimization": zero}
        engine = spmdzero.initialize(model=GPT(size), config=staged)[0]
        reports += [engine.plan.memory(), spmdzero.measure(engine)]
        del engine
        gc.collect()  # before the next engine takes as much memory again
    # A gradient that is not accumulated lives only inside a step.
    kept = [role for role, _ in reports[0] if role != "gradient"]
    table = Table("stage", "", title="MB per device between steps", box=box.SIMPLE_HEAD)
    for role in [*kept, "total"]:
        table.add_column(role, justify="right")
    for row, report in enumerate(reports):
        stage, measured = divmod(row, 2)
        sizes = [report[role] for role in kept]
        start = ["", "measured"] if measured else [str(stage), "planned"]
        table.add_row(*start, *map(megabytes, [*sizes, sum(sizes)]), end_section=bool(measured))
    return table


def megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


if __name__ == "__main__":
    main()
