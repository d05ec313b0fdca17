"""Tables that users bring, as columns of numbers or words: DataFrames, Arrow tables, CSV and Parquet files."""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import FederationError

Column = NDArray[Any]
#: Words for a place in a column of numbers that has none.
GAPS = frozenset(("", "na", "n/a", "nan", "null", "none", "-", "?"))
#: Values that no column of numbers has: codes such as 00123 would lose their zeros.
CODE = re.compile(r"[+-]?0\d")


def columns_of(table: Any) -> dict[str, Column]:
    """The columns of a table by name, all of one length."""
    given = type(table).__name__
    if isinstance(table, np.ndarray) and table.dtype.names:
        names: Any = table.dtype.names
    elif isinstance(table, Mapping):
        names = list(table)
    else:
        table = _collected(table)
        names = getattr(table, "column_names", None) or getattr(table, "columns", ())
    names = list(names)
    if twice := [name for name in names if names.count(name) > 1]:
        raise FederationError(f"The table has several columns called {str(twice[0])!r}: give each a name of its own.")
    columns = {str(name): np.asarray(table[name]) for name in names}
    if not columns:
        raise FederationError(
            f"A table is a DataFrame, an Arrow table, a structured array or a dict of columns, not {given}."
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise FederationError(f"The table's columns differ in length: {lengths}.")
    if not next(iter(lengths.values())):
        raise FederationError("The table has no rows.")
    return columns


def _collected(table: Any) -> Any:
    """A table whose columns can be asked for: lazy ones are worked out, and Arrow reads what only it can."""
    if callable(getattr(table, "collect", None)):
        return table.collect()
    if hasattr(table, "columns") or hasattr(table, "column_names"):
        return table
    name = type(table).__name__
    try:
        if hasattr(table, "__arrow_c_stream__"):
            return _arrow("pyarrow", name).table(table)
        if hasattr(table, "__dataframe__"):
            return _arrow("pyarrow.interchange", name).from_dataframe(table)
    except (TypeError, ValueError):  # one column, such as a Series
        return None
    return table


def read_table(path: str | Path) -> Any:
    """The table in a CSV or Parquet file."""
    path = Path(path)
    if not path.is_file():
        raise FederationError(f"There is no file {path}.")
    ending = path.suffix.lower()
    if ending == ".parquet":
        parquet = _arrow("pyarrow.parquet", str(path))
        try:
            return parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise FederationError(f"{path} cannot be read as Parquet ({error}): write it again.") from error
    if ending not in (".csv", ".tsv"):
        raise FederationError(f"{path} is no table: give a .csv, .tsv or .parquet file.")
    return _read_csv(path, "\t" if ending == ".tsv" else ",")


def _read_csv(path: Path, delimiter: str) -> dict[str, Column]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=delimiter), 1) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FederationError(f"{path} is no text in UTF-8 ({error}): save it as UTF-8.") from error
    if len(lines) < 2:
        raise FederationError(f"{path} has no rows: its first line names the columns, and samples follow.")
    (_, names), *body = lines
    if len(names) == 1 and ";" in names[0]:
        raise FederationError(f"{path} separates columns by semicolons: save it with commas.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise FederationError(f"{path} has several columns called {twice[0]!r}: give each a name of its own.")
    for number, row in body:
        if len(row) != len(names):
            raise FederationError(f"{path} has {len(row)} columns in line {number}, but {len(names)} in the first.")
    rows = (row for _, row in body)
    return {name: _typed(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _arrow(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FederationError(f"{what} needs pyarrow to be read: install it, or write the table as CSV.") from error


def _typed(column: Sequence[str]) -> Column:
    """A column of a CSV file: whole numbers if all are, else numbers (a gap is NaN), else words (a gap is None)."""
    values = [value.strip() for value in column]
    if not any(CODE.match(value) for value in values):
        filled = ["nan" if value.lower() in GAPS else value for value in values]
        for kind in (np.int64, np.float64):
            try:
                return np.array(filled).astype(kind)
            except (ValueError, OverflowError):
                continue
    return np.array([value or None for value in values], dtype=object)


def numbers_of(name: str, column: Column) -> Column:
    """A column of numbers, float64."""
    if column.dtype.kind not in "biuf":
        raise FederationError(
            f"Column {name} is not a column of numbers but of {column.dtype}: leave it out, or encode it."
        )
    numbers = column.astype(np.float64)
    if missing := int((~np.isfinite(numbers)).sum()):
        raise FederationError(
            f"Column {name} has {missing} of {len(numbers)} places without a finite number: fill them, or leave the "
            "rows or the column out."
        )
    return numbers


def words_of(name: str, column: Column) -> Column:
    """The different words of a column, sorted."""
    if column.dtype.kind == "O" and not all(isinstance(value, str | bool) for value in column):
        raise FederationError(
            f"Column {name} has values that are neither numbers nor words, or has gaps: fill them, or leave it out."
        )
    return np.unique(column.astype(str))
