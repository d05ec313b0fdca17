"""Users' own tables as columns of numbers or words: DataFrames, Arrow tables, CSV and Parquet files."""

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
#: Spellings of missing values in a column of numbers.
GAPS = frozenset(("", "na", "n/a", "nan", "null", "none", "-", "?"))
#: Codes such as 00123, which are read as words because they would lose their zeros.
CODE = re.compile(r"[+-]?0\d")


def columns_of(table: Any) -> dict[str, Column]:
    """Return the columns of a table by name, all of the same length."""
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
        raise FederationError(f"The table has several columns called {str(twice[0])!r}: rename them.")
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
    """Return a table with readable columns: lazy tables are collected, others converted through Arrow if necessary."""
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
    except (TypeError, ValueError):  # such as a Series
        return None
    return table


def read_table(path: str | Path) -> Any:
    """Read a CSV or Parquet file."""
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
        raise FederationError(f"{path} is not a table: use a .csv, .tsv or .parquet file.")
    return _read_csv(path, "\t" if ending == ".tsv" else ",")


def _read_csv(path: Path, delimiter: str) -> dict[str, Column]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=delimiter), 1) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FederationError(f"{path} is not UTF-8 text ({error}): save it as UTF-8.") from error
    if len(lines) < 2:
        raise FederationError(f"{path} has no rows: the first line must name the columns, followed by the samples.")
    (_, names), *body = lines
    if len(names) == 1 and ";" in names[0]:
        raise FederationError(f"{path} separates columns by semicolons: save it with commas.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise FederationError(f"{path} has several columns called {twice[0]!r}: rename them.")
    for number, row in body:
        if len(row) != len(names):
            raise FederationError(f"{path} has {len(row)} columns in line {number}, but {len(names)} in the first.")
    rows = (row for _, row in body)
    return {name: _typed(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _arrow(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FederationError(f"{what} requires pyarrow: install it, or write the table as CSV.") from error


def _typed(column: Sequence[str]) -> Column:
    """Parse a CSV column as integers, else as floats (a gap is NaN), else as words (a gap is None)."""
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
    """Convert a column to float64; refuse words and gaps."""
    if column.dtype.kind not in "biuf":
        raise FederationError(f"Column {name} holds {column.dtype}, not numbers: drop it or encode it.")
    numbers = column.astype(np.float64)
    if missing := int((~np.isfinite(numbers)).sum()):
        raise FederationError(
            f"Column {name} has {missing} of {len(numbers)} values missing or not finite: fill them in, or drop "
            "the rows or the column."
        )
    return numbers


def words_of(name: str, column: Column) -> Column:
    """Return the distinct words of a column, sorted."""
    if column.dtype.kind == "O" and not all(isinstance(value, str | bool) for value in column):
        raise FederationError(
            f"Column {name} has gaps or values that are neither numbers nor words: fill them in or drop it."
        )
    return np.unique(column.astype(str))
