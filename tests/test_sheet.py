"""Tables in Markdown, LaTeX and HTML, and for the terminal."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from fl_lightning.sheet import Sheet, cell, figure, latex_text, markdown

AWKWARD = Sheet("a & b", ["run", "x_1 | y"], [["R&D <b>", "50 %"], ["a|b", None], ["{c}\\d", math.nan]], {1: 0})  # type: ignore[list-item]


def test_markdown() -> None:
    assert AWKWARD.markdown() == (
        "| run | x_1 \\| y |\n|---|---:|\n| R&D <b> | **50 %** |\n| a\\|b | - |\n| {c}\\d | - |\n"
    )
    assert markdown(["a", "b"], [[1, "two\nlines"]], left=2) == "| a | b |\n|---|---|\n| 1 | two lines |\n"
    assert markdown(["a", "b"], [], left=0) == "| a | b |\n|---:|---:|\n"


def test_every_row_of_a_latex_table_has_all_columns() -> None:
    text = AWKWARD.latex()
    rows = [line.strip() for line in text.splitlines() if line.endswith(r"\\")]
    assert rows == [
        r"run & x\_1 \textbar{} y \\",
        r"R\&D \textless{}b\textgreater{} & \textbf{50 \%} \\",
        r"a\textbar{}b & - \\",
        r"\{c\}\textbackslash{}d & - \\",
    ]
    assert r"\caption{a \& b}" in text
    assert r"\begin{tabular}{lr}" in text
    assert r"\begin{tabular}{ll}" in Sheet("t", ["a", "b"], [["1", "2"]], words=True).latex()


def test_html() -> None:
    text = AWKWARD.html()
    assert "<thead><tr><th>run</th><th>x_1 | y</th></tr></thead>" in text
    assert '<tr><th scope="row">R&amp;D &lt;b&gt;</th><td><strong>50 %</strong></td></tr>' in text
    assert '<tr><th scope="row">a|b</th><td>-</td></tr>' in text
    assert "<td>-</td>" in Sheet("t", ["a", "b"], [["1", ""]]).html()
    assert '<table class="words">' in Sheet("t", ["a"], [["1"]], words=True).html()


def test_terminal() -> None:
    console = Console(record=True, width=80, file=None, quiet=False, force_terminal=False)
    with console.capture() as said:
        console.print(Sheet("t", ["a", "b"], [["[red]x", "1.5"], ["y", "22.5"]], {1: 0}).rich())
    lines = said.get().splitlines()
    assert any("[red]x" in line for line in lines), "text of a cell is no markup"
    assert [line.rstrip("│ ").endswith(end) for end in ("1.5", "22.5") for line in lines].count(True) == 2


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (math.nan, "-"), (0.5, "0.5"), (0, "0"), ("", ""), (False, "False")]
)
def test_cells(value: object, text: str) -> None:
    assert cell(value) == text


@pytest.mark.parametrize("sign", ["&", "%", "$", "#", "_", "{", "}"])
def test_signs_of_latex_are_escaped(sign: str) -> None:
    assert latex_text(f"a{sign}b") == f"a\\{sign}b"


def test_figures_of_repetitions() -> None:
    assert figure([0.5, math.nan], 1, 100) == "50.0"
    assert figure([1234.0, 1236.0], 0) == "1,235 ± 1"
    assert figure([math.nan]) == ""
