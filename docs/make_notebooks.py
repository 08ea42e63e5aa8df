"""Runs the examples as notebooks, for the documentation.

    python docs/make_notebooks.py           # runs those of `RUN`
    python docs/make_notebooks.py --no-run  # all without outputs

The examples are scripts in the format of keras.io: strings are text, all else
is code. The notebooks are written into docs/notebooks, with a page of links.
"""

from __future__ import annotations

import ast
import concurrent.futures
import os
import pathlib
import re
import sys

import nbclient
import nbformat
from nbformat import v4

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
RUN = [
    "image_classification_from_files",
    "migrate_from_sequence",
    "diagnose_a_slow_pipeline",
]
_AT_ONCE = 1  # they measure times


def notebook_of(script: str) -> nbformat.NotebookNode:
    """Returns the cells of a script, and its title as the first line."""
    lines, cells, end = script.splitlines(), [], 0
    for node in ast.parse(script).body:
        if not isinstance(node, ast.Expr) or not isinstance(
            node.value, ast.Constant
        ):
            continue
        _add_code(cells, lines[end : node.lineno - 1])
        text = node.value.value.strip()
        if not cells:
            text = "# {Title}\n\n{Description}".format(
                **dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
            )
        cells.append(v4.new_markdown_cell(text))
        end = node.end_lineno
    _add_code(cells, lines[end:])
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return v4.new_notebook(cells=cells)


def _add_code(cells: list[nbformat.NotebookNode], lines: list[str]) -> None:
    if code := "\n".join(lines).strip():
        cells.append(v4.new_code_cell(code))


def make(name: str, runs: bool) -> str:
    """Writes the notebook of an example; returns its title."""
    notebook = notebook_of((ROOT / "examples" / f"{name}.py").read_text())
    if runs:
        nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [*filter(_has_text, cell.outputs)]
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")
    heading, description = notebook.cells[0].source.split("\n\n", 1)
    return f"| [{heading[2:]}]({name}.ipynb) | {description} |\n"


def _has_text(output: nbformat.NotebookNode) -> bool:
    """Whether an output is more than what TensorFlow's C++ code writes.

    It is written when TensorFlow is imported. The output loses such lines.
    """
    if output.get("name") != "stderr":
        return True
    noise = ("WARNING: All log messages before absl", "I0000 ", "E0000 ")
    lines = output.text.splitlines(keepends=True)
    output.text = "".join(each for each in lines if not each.startswith(noise))
    return bool(output.text.strip())


def main(runs: bool) -> None:
    """Writes all notebooks, and the page of links."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    FOLDER.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = [*pool.map(lambda name: make(name, runs), RUN)]
    others = sorted(
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if path.stem not in RUN
    )
    (FOLDER / "index.md").write_text(
        "# Notebooks\n\n"
        "These are scripts of the folder `examples`, with what they print. "
        "They were run when these pages were built.\n\n"
        "| notebook | what it shows |\n|---|---|\n" + "".join(rows) + "\n"
        "Further scripts in that folder: "
        + ", ".join(f"`{name}`" for name in others)
        + ".\n"
    )


if __name__ == "__main__":
    main("--no-run" not in sys.argv)
