"""Tables: for the terminal, in Markdown, in LaTeX and in HTML."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_LATEX |= {"^": r"\^{}", "\\": r"\textbackslash{}", "²": r"$^2$", "±": r"$\pm$", "|": r"\textbar{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}"}


@dataclass
class Sheet:
    """A table of texts; the first column names the row, the others are numbers.

    Args:
        title: title of the table.
        columns: headings.
        rows: one cell per column; None and NaN are printed as a dash.
        best: by column, the row to print in bold.
        words: whether the other columns are words, not numbers.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    best: dict[int, int] = field(default_factory=dict)
    words: bool = False

    @property
    def left(self) -> int:
        """Number of left-aligned columns."""
        return len(self.columns) if self.words else 1

    def cells(self, mark: str, escape: Callable[[str], str] = str) -> Iterator[list[str]]:
        """Yield rows of texts with the best cells marked.

        Args:
            mark: format of a best cell, with ``{}`` for its text.
            escape: escapes a cell's text.
        """
        for number, row in enumerate(self.rows):
            texts = [escape(cell(value)) for value in row]
            yield [mark.replace("{}", text) if self.best.get(i) == number else text for i, text in enumerate(texts)]

    def rich(self) -> Table:
        """Format for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.left else "right", overflow="fold")
        for row in self.cells("[bold]{}[/bold]", escape):
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Format as Markdown."""
        return markdown(self.columns, self.cells("**{}**"), self.left)

    def latex(self) -> str:
        """Format as LaTeX; needs the package booktabs."""
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex_text(self.title)}}}",
            rf"  \begin{{tabular}}{{{'l' * self.left}{'r' * (len(self.columns) - self.left)}}}",
            r"    \toprule",
            f"    {' & '.join(map(latex_text, self.columns))} \\\\",
            r"    \midrule",
            *(f"    {' & '.join(row)} \\\\" for row in self.cells(r"\textbf{{}}", latex_text)),
        ]
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"

    def html(self) -> str:
        """Format as HTML; empty cells get a dash as well."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = ""
        for row in self.cells("<strong>{}</strong>", html.escape):
            first, *rest = (text or "-" for text in row)
            numbers = "".join(f"<td>{text}</td>" for text in rest)
            body += f'<tr><th scope="row">{first}</th>{numbers}</tr>\n'
        kind = ' class="words"' if self.words else ""
        return f"<table{kind}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def cell(value: object) -> str:
    """Format a cell, with a dash for unknown values.

    Example:
        >>> cell(None), cell(float("nan")), cell(0), cell("")
        ('-', '-', '0', '')
    """
    return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def markdown_row(cells: Iterable[object]) -> str:
    r"""Format a row of a Markdown table; cells may contain Markdown, but neither bars nor line breaks.

    Example:
        >>> markdown_row(["a|b", 1, None])
        '| a\\|b | 1 | - |'
    """
    texts = (" ".join(cell(value).splitlines()).replace("|", r"\|") for value in cells)
    return f"| {' | '.join(texts)} |"


def markdown_head(columns: Sequence[object], left: int = 1) -> str:
    """Format the headings of a Markdown table and the line below, with the first columns left-aligned.

    Example:
        >>> print(markdown_head(["method", "accuracy"]))
        | method | accuracy |
        |---|---:|
    """
    return f"{markdown_row(columns)}\n|{'---|' * left}{'---:|' * (len(columns) - left)}"


def markdown(columns: Sequence[object], rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """Format a Markdown table, with the first columns left-aligned and the others right-aligned."""
    return "\n".join([markdown_head(columns, left), *map(markdown_row, rows)]) + "\n"


def latex_text(text: str) -> str:
    r"""Escape LaTeX's special characters.

    Example:
        >>> latex_text("50 % of fc_1")
        '50 \\% of fc\\_1'
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)


def figure(values: Sequence[float], digits: int = 2, scale: float = 1.0) -> str:
    """Format the mean over repetitions, with the sample standard deviation if they differ.

    Example:
        >>> figure([0.91, 0.93], 1, scale=100), figure([3.0, 3.0]), figure([])
        ('92.0 ± 1.4', '3.00', '')
    """
    known = [scale * value for value in values if not math.isnan(value)]
    if not known:
        return ""
    text = f"{statistics.fmean(known):,.{digits}f}"
    return text if len(set(known)) == 1 else f"{text} ± {statistics.stdev(known):,.{digits}f}"
