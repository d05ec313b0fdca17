"""Formatting of names and numbers on the pages."""

from __future__ import annotations

from fl_lightning.papers import tables


def name_of(word: str) -> str:
    """Return the display name of a data set, method or metric."""
    names: dict[str, str] = tables.pages()["names"]
    return names.get(word, word)


def figure(value: float | None, std: float | None = None) -> str:
    """Format a number with its standard deviation, or a dash.

    Example:
        >>> figure(94.456, 0.843), figure(120200.0), figure(None)
        ('94.46 ± 0.84', '120,200', '-')
    """
    if value is None:
        return "-"
    text = f"{value:,.0f}" if float(value).is_integer() and value > 1000 else f"{value:.2f}"
    return f"{text} ± {std:.2f}" if std else text
