"""Runs notebooks as a reader would. `python -m tests.notebooks.execute` writes all outputs anew."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook of `path` with the outputs of a fresh kernel; the file stays as it is."""
    notebook = nbformat.read(path, as_version=4)
    metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    client = NotebookClient(
        notebook,
        timeout=900,
        record_timing=False,
        # Else two prints are one output or two, by how long lies between them.
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    _leave_out_log_lines(notebook)
    # The kernel adds its own version, which would differ from one machine to the next.
    notebook.metadata = nbformat.from_dict(metadata)
    return notebook


def _leave_out_log_lines(notebook: nbformat.NotebookNode) -> None:
    """Takes out spmdzero's lines of the level INFO, which have the time, and the backend, in them.

    A reader sees them below the cell.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kept: list[nbformat.NotebookNode] = []
            for output in cell.outputs:
                if _is_log(output):
                    continue
                if kept and output.get("name") and output.get("name") == kept[-1].get("name"):
                    # A line between two parts of a stream had cut it.
                    kept[-1].text += output.text
                else:
                    kept.append(output)
            cell.outputs = kept


def _is_log(output: nbformat.NotebookNode) -> bool:
    lines = output.text.splitlines() if output.get("name") == "stderr" else []
    return bool(lines) and all("] [INFO] [spmdzero] " in line for line in lines)


def main() -> None:
    """One notebook to another file, or all of them (or those that start so) in place."""
    os.environ["PJRT_DEVICE"] = "CPU"
    # As in tests/conftest.py: LLVM's optimisation would take most of the time, and shows nowhere.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if len(sys.argv) == 3:
        nbformat.write(execute(Path(sys.argv[1])), sys.argv[2])
        return
    prefix = sys.argv[1] if len(sys.argv) > 1 else ""
    for path in sorted(NOTEBOOKS.glob(f"{prefix}*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
