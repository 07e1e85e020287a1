"""What `spmdzero plan` finds beside configs that were written by hand, by the TPU's compiler.

python tests/benchmarks/searched.py                       all of it: some hours on two cores
python tests/benchmarks/searched.py --only "Llama 8B"     one search

Prints the table of docs/what_to_write.md. Needs no TPU, only `pip install 'jax[tpu]'`; tpu7x needs
a newer JAX and libtpu than 0.0.21. What a search printed is kept in `out/searched`.
"""

import argparse
import dataclasses
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

# Before what a script's own folder would hide.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from harness.launch import launch_alone
from harness.processes import ProcessFailedError

from spmdzero.explain import Topology

KEPT = Path(__file__).resolve().parents[2] / "out" / "searched"
TIMEOUT = 2 * 3600  # seconds
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search, and the configs beside it.

    Attributes:
        case, topology: as in `on_tpu.cases`.
        by_hand: title -> a row of `on_tpu.cases.ROWS`, or a real JSON, of `on_tpu/jsons`.
        programs: the most that are compiled.
    """

    case: str
    topology: str
    by_hand: dict[str, str]
    programs: int = 8


_PAGE = "docs/benchmarks.md"
SEARCHES: Mapping[str, Search] = {
    "GPT-2 124M": Search(case="gpt2", topology="v5e:2x4", by_hand={
        _PAGE: "ours",
        "LLaMA-Factory's z2": "llamafactory_z2.json",
        "ms-swift's zero3": "ms_swift_zero3.json",
        "VILA's zero3pp": "vila_zero3pp.json",
        "WizardLM's zero3, offloaded": "wizardlm_zero3_offload.json",
    }),
    "BERT-base": Search(case="bert", topology="v5e:2x4", by_hand={
        _PAGE: "ours",
        "FlagEmbedding's stage 0": "flagembedding_stage0.json",
    }),
    "Llama 1B": Search(case="llama-2k", topology="v6e:2x4", by_hand={_PAGE: "ours-nothing"}),
    "Llama 8B": Search(case="llama-8b", topology="v6e:2x4", by_hand={_PAGE: "ours-context"}),
    "Qwen3-MoE, 12 layers": Search(
        case="qwen3-moe", topology="v6e:2x4", by_hand={_PAGE: "ours-scan"}
    ),
    "Llama 70B": Search(
        case="llama-70b", topology="tpu7x:4x4x4", by_hand={_PAGE: "ours-kept"}, programs=2
    ),
}  # fmt: skip
HEAD = (
    "| model | slice | by hand | its ms | what was found | its ms | found / by hand | peak GiB "
    "| minutes | host GiB |\n|---|---|---|---:|---|---:|---:|---:|---:|---:|"
)


def main() -> None:
    """Prints the table, a row when its search has ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SEARCHES, help="again for more")
    parser.add_argument("--size", default="full", choices=("full", "tiny"), help="of the models")
    asked = parser.parse_args()
    print(HEAD, flush=True)
    for title in asked.only or SEARCHES:
        for line in _lines(title, SEARCHES[title], size=asked.size):
            print(line, flush=True)


def _lines(title: str, search: Search, *, size: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as cache:
        watch = HostMemory()
        try:
            found = launch_alone(
                "on_tpu.search", devices=Topology.parse(search.topology).devices, backend="jax",
                timeout=TIMEOUT, size=size, cache=cache, **dataclasses.asdict(search),
            )  # fmt: skip
        except ProcessFailedError as error:
            yield f"| {title} | {search.topology} | {error.headline} |"
            return
        finally:
            peak = watch.end()
            _keep(title, Path(cache, "log"))
    KEPT.joinpath(f"{title}.txt").write_text(found["plan"] + "\n")
    best = found["seconds"]
    end = f"{(found['peak'] or 0) / GIB:.2f} | {found['minutes']:.1f} | {peak / GIB:.1f} |"
    for name, own in found["by_hand"].items() or {"": None}.items():
        ratio = f"{best / own:.2f}" if own and best else ""
        yield (
            f"| {title} | {search.topology} | {name} | {_ms(own) if name else ''} "
            f"| {found['words'] or 'nothing fits'} | {_ms(best)} | {ratio} | {end}"
        )


def _ms(seconds: float | None) -> str:
    return "doesn't fit" if seconds is None else f"{1e3 * seconds:,.2f}"


def _keep(title: str, log: Path) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    if log.exists():
        KEPT.joinpath(f"{title}.log").write_text(log.read_text())


class HostMemory:
    """Watches the memory of this process's children, and theirs: compilers are such."""

    def __init__(self) -> None:
        self._peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """The most bytes that they had in memory together; shared pages count for each."""
        self._over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._over.wait(0.5):
            self._peak = max(self._peak, sum(map(_resident, own.children(recursive=True))))


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", file=sys.stderr)
