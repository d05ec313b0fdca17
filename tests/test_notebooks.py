"""Notebooks equal their scripts, run completely, and print no noise."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.py"))
nbformat = pytest.importorskip("nbformat", reason="jupytext is not installed: pip install -e '.[dev]'")
pytest.importorskip("jupytext", reason="jupytext is not installed: pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """docs/notebooks.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("made_notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_notebook_is_that_of_its_script(maker: ModuleType) -> None:
    assert {"quickstart", "own_data", "own_method", "attacks", "deployment"} <= set(NAMES)
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES
    for name in NAMES:
        saved = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
        assert saved.rstrip() == nbformat.writes(maker.made(maker.SCRIPTS / f"{name}.py")).rstrip(), "make notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_without_noise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert outputs
    for noise in ("Tip", "warn", "Warn", "available:", "override", "deprecat", "Traceback"):
        assert noise not in printed, printed
    if name == "deployment":
        assert "equal, bit for bit: True" in printed


@pytest.mark.slow
def test_progress_is_one_line_that_ends_with_the_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = (
        "from lightning.pytorch import Trainer\n"
        "from fl_lightning import MLP, Digits, FedAvg, Unimodal\n"
        "from fl_lightning.callbacks import RoundProgress\n"
        "quiet = dict(logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator='cpu')\n"
        "method, data = FedAvg(MLP(64), engine='stacked'), Digits(partition=Unimodal(clients=10))\n"
    )
    bars = ("", "callbacks=[RoundProgress()], ")  # Lightning's own choice, and ours
    cells = [nbformat.v4.new_code_cell(f"{run}Trainer(max_epochs=10, {bar}**quiet).fit(method, data)") for bar in bars]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells:
        told = [output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data"]
        assert len(told) == 1, told
        assert told[0].startswith("round 10/10  clients 10/10")
