"""The picture of README and the landing page: a figure of the first notebook."""

import base64

import nbformat

from tests.notebooks.execute import NOTEBOOKS

PICTURE = NOTEBOOKS.parent / "docs" / "pictures" / "zero_is_a_table.png"


def drawn() -> bytes:
    """As the notebook was committed with it."""
    notebook = nbformat.read(NOTEBOOKS / "01_zero_is_a_table.ipynb", as_version=4)
    figures = [
        output.data["image/png"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(figures[0])


if __name__ == "__main__":
    PICTURE.write_bytes(drawn())
    print(f"wrote {PICTURE.name}")
