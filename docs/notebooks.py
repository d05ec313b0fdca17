"""Makes notebooks/*.ipynb from the scripts in examples/notebooks, without outputs: ``make notebooks``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import nbformat

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "notebooks"
NOTEBOOKS = ROOT / "notebooks"


def made(script: Path) -> Any:
    """The notebook of a script whose cells begin with ``# %%``; the same in every run."""
    notebook = jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


if __name__ == "__main__":
    for script in sorted(SCRIPTS.glob("*.py")):
        nbformat.write(made(script), NOTEBOOKS / f"{script.stem}.ipynb")
