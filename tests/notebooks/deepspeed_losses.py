"""The losses in 04_from_deepspeed.ipynb are DeepSpeed's own, of the notebook's own cells.

`python -m tests.notebooks.deepspeed_losses` runs them under DeepSpeed and writes the losses anew.
"""

import ast
import json
import tempfile
from pathlib import Path

import nbformat

from tests.notebooks.execute import NOTEBOOKS
from tests.support.deepspeed import run_ranks

PATH = NOTEBOOKS / "04_from_deepspeed.ipynb"
RANKS = 2
OURS, THEIRS = "import spmdzero as deepspeed", "import deepspeed"
# A rank's loss is of its own rows.
PRINT_MEANS = """
import json
means = torch.stack(losses)
deepspeed.comm.all_reduce(means)
print(json.dumps([round(m, 6) for m in (means / deepspeed.comm.get_world_size()).tolist()]))
"""


def tagged(tag: str) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(PATH, as_version=4).cells
    return [cell for cell in cells if tag in cell.metadata.get("tags", ())]


def recorded() -> list[float]:
    (cell,) = tagged("recorded")
    return ast.literal_eval(cell.source.partition(" = ")[2])


def under_deepspeed() -> list[float]:
    """The loss of each micro-batch, as the mean over DeepSpeed's ranks."""
    script = "\n".join(cell.source for cell in tagged("script"))
    assert script.count(OURS) == 1
    script = script.replace(OURS, THEIRS)
    assert "spmdzero" not in script
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(script + PRINT_MEANS)
        printed = run_ranks(["script.py"], ranks=RANKS, cwd=Path(folder), timeout=300)[0]
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    losses = under_deepspeed()
    notebook = nbformat.read(PATH, as_version=4)
    (cell,) = (c for c in notebook.cells if "recorded" in c.metadata.get("tags", ()))
    rows = [losses[at : at + 8] for at in range(0, len(losses), 8)]
    lines = "\n".join("    " + "".join(f"{loss:.6f}, " for loss in row).rstrip() for row in rows)
    cell.source = f"# fmt: off\ndeepspeed_losses = [\n{lines}\n]"
    nbformat.write(notebook, PATH)
    print(f"wrote {len(losses)} losses into {PATH.name}")


if __name__ == "__main__":
    main()
