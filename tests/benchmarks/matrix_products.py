"""How fast torch and XLA's CPU compiler compute the matrix products of a GPT, on the same cores.

For torch a thread for each device computes its part, as a rank with one core would; under XLA each
device computes the same part. They take turns.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from harness.turns import Way, take_turns
from harness.workload import ROWS, SIZES, Size

import spmdzero
from spmdzero.backend import current, runtime
from spmdzero.plan import MeshSpec

# Products of one turn, so that starting a program doesn't count.
COUNT = 4

# Of each device, COUNT pairs to multiply.
Parts: TypeAlias = list[list[tuple[torch.Tensor, torch.Tensor]]]
# Each way's first product of each device, of its last turn.
Results: TypeAlias = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`left @ right` on one device.

    Attributes:
        left, right: shapes before they are transposed.
        transposed: which of them is.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    transposed: str = ""

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product."""
        return torch.matmul(
            left.mT if self.transposed == "left" else left,
            right.mT if self.transposed == "right" else right,
        )

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        columns = self.right[-2 if self.transposed == "right" else -1]
        return 2 * math.prod(self.left) * columns


def products_of(size: Size, devices: int) -> Mapping[str, Product]:
    """The kinds of product in a step, for the rows of one device."""
    tokens = ROWS // devices * size.sequence
    narrow, wide = (tokens, size.width), (tokens, 4 * size.width)
    weight = (4 * size.width, size.width)
    heads = (ROWS // devices * size.heads, size.sequence, size.width // size.heads)
    # Makes the rows of a result no multiple of 8 KiB.
    more = 64

    def forward(columns: int) -> Product:
        return Product(left=narrow, right=(columns, size.width), transposed="right")

    return {
        "MLP, forward": forward(4 * size.width),
        f"MLP, forward, {more} columns more": forward(4 * size.width + more),
        "MLP, gradient of its input": Product(left=wide, right=weight),
        "MLP, gradient of its weight": Product(left=wide, right=narrow, transposed="left"),
        "vocabulary, forward": forward(size.vocabulary),
        f"vocabulary, forward, {more} columns more": forward(size.vocabulary + more),
        "attention, scores": Product(left=heads, right=heads, transposed="right"),
    }


def measure(model: str, devices: int, repeats: int, xnnpack: bool) -> dict[str, dict[str, float]]:
    """Product -> "torch" and "xla": billions of operations a second on all cores, the median.

    Under "difference" how far apart the two results are, relative to the largest element.
    """
    if xnnpack:
        # spmdzero leaves it out unless it is named.
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_xnnpack=true"
    return {
        name: _measured(product, devices=devices, repeats=repeats)
        for name, product in products_of(SIZES[model], devices).items()
    }


def _measured(product: Product, *, devices: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    parts = [
        [(torch.randn(product.left), torch.randn(product.right)) for _ in range(COUNT)]
        for _ in range(devices)
    ]
    results: Results = {}
    ways = {
        "torch": _in_threads(product, parts, results),
        "xla": _on_devices(product, parts, results),
    }
    taken = take_turns(ways, turns=repeats, warm_up=2)
    operations = product.operations * COUNT * devices
    speeds = {name: operations / statistics.median(t.whole) / 1e9 for name, t in taken.items()}
    apart = (results["xla"].cpu() - results["torch"]).abs().max() / results["torch"].abs().max()
    return {"difference": apart.item(), **speeds}


def _in_threads(product: Product, parts: Parts, results: Results) -> Way:
    # How many threads torch takes for a product is a number of each thread's own.
    pool = ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,))

    def compute() -> None:
        found = list(pool.map(lambda part: [product(*pair) for pair in part], parts))
        results["torch"] = torch.cat([products[0] for products in found])

    return lambda _: compute


def _on_devices(product: Product, parts: Parts, results: Results) -> Way:
    spmdzero.init_distributed()
    mesh = current().mesh(MeshSpec((("fsdp", len(parts)),)))

    def placed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return mesh.place(torch.cat(list(tensors)), mesh.batch_spec(tensors[0].dim()))

    pairs = [
        tuple(placed([part[turn][side] for part in parts]) for side in (0, 1))
        for turn in range(COUNT)
    ]

    def prepare(_: int) -> Callable[[], object]:
        found = []
        for pair in pairs:
            left, right = (mesh.enter(x, mesh.batch_spec(x.dim())) for x in pair)
            mine = product(left, right)
            shape = (len(parts) * mine.shape[0], *mine.shape[1:])
            found.append(mesh.leave(mine, mesh.batch_spec(mine.dim()), shape))
        results["xla"] = found[0]
        # Holds the products until they are computed.
        return lambda: (runtime.sync(), found)

    return prepare
