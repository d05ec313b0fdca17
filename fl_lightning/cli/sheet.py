"""A table that can be printed, read in Markdown and set in LaTeX."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_LATEX |= {"^": r"\^{}", "\\": r"\textbackslash{}", "²": r"$^2$", "±": r"$\pm$"}


@dataclass
class Sheet:
    """Headings and rows of text; the first column names the row, the others are numbers.

    Args:
        title: what the table shows.
        columns: headings.
        rows: texts, one per column.
        best: by column the row to be set in bold.
        words: whether the other columns are words, not numbers.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    best: dict[int, int] = field(default_factory=dict)
    words: bool = False

    def rich(self) -> Table:
        """For the terminal."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for number, row in enumerate(self.rows):
            cells = [escape(cell) for cell in row]
            table.add_row(*(f"[bold]{c}[/bold]" if self.best.get(i) == number else c for i, c in enumerate(cells)))
        return table

    def markdown(self) -> str:
        """For notes and pages."""
        lines = ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        for number, row in enumerate(self.rows):
            cells = [cell.replace("|", r"\|") for cell in row]
            marked = (f"**{c}**" if self.best.get(i) == number else c for i, c in enumerate(cells))
            lines.append("| " + " | ".join(marked) + " |")
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """For papers; needs the package booktabs."""
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex_text(self.title)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
            r"    \toprule",
            f"    {' & '.join(map(latex_text, self.columns))} \\\\",
            r"    \midrule",
        ]
        for number, row in enumerate(self.rows):
            cells = [latex_text(cell) for cell in row]
            marked = (rf"\textbf{{{c}}}" if self.best.get(i) == number else c for i, c in enumerate(cells))
            lines.append(f"    {' & '.join(marked)} \\\\")
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"


def latex_text(text: str) -> str:
    r"""Text with LaTeX's own signs made harmless.

    Example:
        >>> latex_text("50 % of fc_1")
        '50 \\% of fc\\_1'
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)


def figure(values: Sequence[float], digits: int = 2, scale: float = 1.0) -> str:
    """Mean of a number over repetitions, with the sample standard deviation where they differ.

    Example:
        >>> figure([0.91, 0.93], 1, scale=100), figure([3.0, 3.0]), figure([])
        ('92.0 ± 1.4', '3.00', '')
    """
    known = [scale * value for value in values if not math.isnan(value)]
    if not known:
        return ""
    text = f"{statistics.fmean(known):,.{digits}f}"
    return text if len(set(known)) == 1 else f"{text} ± {statistics.stdev(known):,.{digits}f}"
