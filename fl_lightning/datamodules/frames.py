"""Data that users bring: arrays with a column of clients, tables with named columns, data sets of samples."""

from __future__ import annotations

import csv
import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fl_lightning.datamodules.base import Samples
from fl_lightning.datamodules.partitions.base import PartitionScheme
from fl_lightning.datamodules.partitions.users import ByUser
from fl_lightning.datamodules.tensors import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex

Column = NDArray[Any]


class FromArrays(TensorFederation):
    """Arrays, with a column that says whose sample each row is.

    Args:
        inputs: all samples, shape (n, ...): an array, a tensor, or the path of a ``.npy`` file, which is mapped into
            memory and may be larger than it.
        targets: what is to be predicted of each, shape (n, ...): the same.
        clients: whose sample each row is, shape (n,); None deals the samples by ``partition``.
        test_fraction: part of each client's samples that it is tested on.
        min_samples: clients with fewer samples are left out.
        **kwargs: as for :class:`~fl_lightning.datamodules.TensorFederation`.

    Example:
        >>> x, y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
        >>> data = FromArrays(x, y, clients=["north"] * 4 + ["south"] * 6)
        >>> data.federation.train.sizes.tolist(), data.federation.meta["user"]
        ([2, 4], ['north', 'south'])
    """

    def __init__(
        self,
        inputs: Tensor | ArrayLike | str | Path,
        targets: Tensor | ArrayLike | str | Path,
        clients: Sequence[Any] | Tensor | ArrayLike | None = None,
        test_fraction: float = 0.2,
        min_samples: int = 2,
        **kwargs: Any,
    ) -> None:
        dealt = _by_client(clients, test_fraction, min_samples)
        super().__init__(_mapped(inputs, "inputs"), _mapped(targets, "targets"), **{**dealt, **kwargs})


def _by_client(clients: Any, test_fraction: float, min_samples: int) -> dict[str, Any]:
    """The partition that goes by a column of clients."""
    if clients is None:
        return {}
    users = clients.tolist() if isinstance(clients, Tensor | np.ndarray) else list(clients)
    if any(user is None or user != user for user in users):
        raise FederationError("Some samples have no client: leave them out, or give them one.")
    return {"users": users, "partition": ByUser(None, min_samples, test_fraction)}


def _mapped(values: Any, name: str) -> Any:
    """Values, or those of a ``.npy`` file, without reading them."""
    if not isinstance(values, str | Path):
        return values
    try:
        array = np.load(values, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise FederationError(f"{name}: {values} cannot be read as a .npy file ({error}).") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to, which nobody does
        return torch.from_numpy(array)


class FromFrame(TensorFederation):
    """A table with a column that says whose row it is, and columns to predict from and to predict.

    Numbers are standardised with the mean and standard deviation of the training rows alone, and columns of words
    become a column for each word that training rows have.

    Args:
        table: a pandas or polars DataFrame, an Arrow table, a structured array, or a dict of columns.
        client: the column that says whose row it is.
        target: the column to predict, or several columns of numbers.
        features: the columns to predict from; None takes all others.
        categorical: columns of numbers that are to be treated as words.
        stratify: a column by which a ``partition`` deals the rows of one ``client=None``.
        standardize: whether numbers are standardised.
        test_fraction: part of each client's rows that it is tested on.
        min_samples: clients with fewer rows are left out.
        **kwargs: as for :class:`~fl_lightning.datamodules.TensorFederation`.

    Attributes:
        classes: the words of a target that is one of several; empty where it is a number.
        feature_names: what the net's inputs are.

    Example:
        >>> table = {"site": ["a"] * 4 + ["b"] * 4, "age": [20, 30, 40, 50, 60, 70, 80, 90],
        ...          "sex": ["f", "m"] * 4, "days": [1.5, 2.0, 1.0, 7.5, 3.0, 4.0, 2.5, 6.0]}
        >>> data = FromFrame(table, client="site", target="days")
        >>> data.feature_names, data.input_shape
        (['age', 'sex=f', 'sex=m'], (3,))
    """

    def __init__(
        self,
        table: Any,
        client: str | None,
        target: str | Sequence[str],
        features: Sequence[str] | None = None,
        categorical: Sequence[str] = (),
        stratify: str | None = None,
        standardize: bool = True,
        test_fraction: float = 0.2,
        min_samples: int = 2,
        **kwargs: Any,
    ) -> None:
        columns = columns_of(table)
        wanted = [target] if isinstance(target, str) else list(target)
        named = [*wanted, *(name for name in (client, stratify) if name is not None)]
        chosen = [name for name in columns if name not in named] if features is None else list(features)
        for name in (*named, *chosen, *categorical):
            _check_known(name, columns)
        if leaking := sorted(set(chosen) & set(wanted)):
            raise FederationError(f"{leaking[0]} is both a feature and a target: take it out of features.")
        if not chosen:
            raise FederationError("The table has no columns to predict from: name some as features.")
        self.standardized, self.classes = standardize, list[str]()
        self._words = {n: _words(n, columns[n]) for n in chosen if columns[n].dtype.kind in "OSUb" or n in categorical}
        self._names = chosen
        values = [self._codes(name, columns[name]) for name in chosen]
        dealt = _by_client(None if client is None else columns[client], test_fraction, min_samples)
        super().__init__(
            np.stack(values, axis=1),
            self._targets(wanted, columns),
            stratify=None if stratify is None else columns[stratify],
            **{**dealt, **kwargs},
        )

    def _codes(self, name: str, column: Column) -> Column:
        """A column as numbers; words by their places among all."""
        if name in self._words:
            return np.searchsorted(self._words[name], column.astype(str)).astype(np.float64)
        return _numbers(name, column)

    def _targets(self, names: list[str], columns: Mapping[str, Column]) -> Column:
        """The targets: classes where they are words, whole numbers of 0 or more as they are, else numbers."""
        first = columns[names[0]]
        if len(names) > 1:
            return np.stack([_numbers(name, columns[name]) for name in names], axis=1).astype(np.float32)
        if first.dtype.kind in "OSUb":
            words = _words(names[0], first)
            self.classes = words.tolist()
            return np.searchsorted(words, first.astype(str))
        numbers = _numbers(names[0], first)
        return first.astype(np.int64) if first.dtype.kind in "iu" and first.min() >= 0 else numbers.astype(np.float32)

    def encode(self, samples: Samples, train: ClientIndex) -> Tensor:
        """Standardised numbers and a column for each word, by what training rows have."""
        seen = samples.inputs[train.flat]
        parts, self._inputs = list[Tensor](), list[str]()
        for place, name in enumerate(self._names):
            column, known = samples.inputs[:, place], seen[:, place]
            if name in self._words:
                codes = torch.unique(known)
                parts.append((column[:, None] == codes).double())
                self._inputs += [f"{name}={self._words[name][int(code)]}" for code in codes]
            else:
                parts.append(_standardized(column, known)[:, None] if self.standardized else column[:, None])
                self._inputs.append(name)
        return torch.cat(parts, dim=1).float()

    @property
    def scale(self) -> str:
        """What the net's inputs depend on besides the rows."""
        return "" if self.standardized else "not standardised"

    @property
    def feature_names(self) -> list[str]:
        """The net's inputs by name; words that no training row has are not among them."""
        _ = self.federation
        return self._inputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample's inputs."""
        return (len(self.feature_names),)

    @input_shape.setter
    def input_shape(self, value: tuple[int, ...]) -> None:
        """Known only when it is known what training rows have."""


class Table(FromFrame):
    """A CSV or Parquet file with a column that says whose row it is; see :class:`FromFrame`.

    On the command line: ``--data Table --data.path patients.csv --data.client hospital --data.target los``.

    Args:
        path: the file, ``.csv`` (with a first line of names) or ``.parquet``.
        client: the column that says whose row it is.
        target: the column to predict, or several columns of numbers.
        features: the columns to predict from; None takes all others.
        categorical: columns of numbers that are to be treated as words.
        standardize: whether numbers are standardised with the training rows' mean and deviation.
        test_fraction: part of each client's rows that it is tested on.
        min_samples: clients with fewer rows are left out.
        partition: how rows are dealt where ``client`` is None.
        fraction: share of the clients that trains in a round.
        val_fraction: part of each client's training rows that is held out for validation.
        seed: decides who is tested on what and who trains when; unless given, the seed of ``seed_everything``.
    """

    def __init__(
        self,
        path: str,
        client: str | None,
        target: str | list[str],
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        standardize: bool = True,
        test_fraction: float = 0.2,
        min_samples: int = 2,
        partition: PartitionScheme | None = None,
        fraction: float = 1.0,
        val_fraction: float = 0.0,
        seed: int | None = None,
    ) -> None:
        options: dict[str, Any] = {"fraction": fraction, "val_fraction": val_fraction, "seed": seed}
        if partition is not None:
            options["partition"] = partition
        table, words = read_table(path), categorical or ()
        super().__init__(
            table, client, target, features, words, None, standardize, test_fraction, min_samples, **options
        )


class FromDataset(TensorFederation):
    """A data set of samples, of torch or of Hugging Face: read once and held in memory.

    Args:
        dataset: anything with a length and samples by number, each a pair, a tuple or a dict.
        client: where a sample says whose it is: a key, a place, or a function of the sample; None deals the samples by
            ``partition``.
        inputs: the key or place of the inputs.
        target: the key or place of the target.
        test_fraction: part of each client's samples that it is tested on.
        min_samples: clients with fewer samples are left out.
        **kwargs: as for :class:`~fl_lightning.datamodules.TensorFederation`.

    Example:
        >>> rows = [{"x": [0.5, i], "y": i % 2, "who": "ab"[i // 5]} for i in range(10)]
        >>> FromDataset(rows, client="who", inputs="x", target="y").federation.train.sizes.tolist()
        [3, 3]
    """

    def __init__(
        self,
        dataset: Any,
        client: str | int | Callable[[Any], Any] | None = None,
        inputs: str | int = 0,
        target: str | int = 1,
        test_fraction: float = 0.2,
        min_samples: int = 2,
        **kwargs: Any,
    ) -> None:
        try:
            samples = [dataset[i] for i in range(len(dataset))]
        except TypeError as error:
            raise FederationError(
                f"FromDataset needs a data set with a length and samples by number: {error}."
            ) from error
        clients = None if client is None else [client(s) if callable(client) else _item(s, client) for s in samples]
        super().__init__(
            _stacked([_item(sample, inputs) for sample in samples], "inputs"),
            _stacked([_item(sample, target) for sample in samples], "targets"),
            **_by_client(clients, test_fraction, min_samples),
            **kwargs,
        )


def columns_of(table: Any) -> dict[str, Column]:
    """The columns of a table by name, all of one length."""
    if isinstance(table, np.ndarray) and table.dtype.names:
        names: Any = table.dtype.names
    elif isinstance(table, Mapping):
        names = list(table)
    else:
        names = getattr(table, "column_names", None) or getattr(table, "columns", ())
    columns = {str(name): np.asarray(table[name]) for name in names}
    if not columns:
        raise FederationError(
            "A table is a DataFrame, an Arrow table, a structured array or a dict of columns, not "
            f"{type(table).__name__}."
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise FederationError(f"The table's columns differ in length: {lengths}.")
    if not next(iter(lengths.values())):
        raise FederationError("The table has no rows.")
    return columns


def read_table(path: str | Path) -> Any:
    """The table in a CSV or Parquet file."""
    path = Path(path)
    if not path.exists():
        raise FederationError(f"There is no file {path}.")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix not in (".csv", ".tsv"):
        raise FederationError(f"{path} is no table: give a .csv, .tsv or .parquet file.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    names, body = (rows[0], rows[1:]) if rows else ([], [])
    for number, row in enumerate(body, start=2):
        if len(row) != len(names):
            raise FederationError(f"{path} has {len(row)} columns in line {number}, but {len(names)} in the first.")
    return {name: _typed(column) for name, column in zip(names, zip(*body, strict=True), strict=False)}


def _read_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise FederationError(f"{path} needs pyarrow to be read: install it, or write the table as CSV.") from error
    return pyarrow.parquet.read_table(path)


def _typed(column: Sequence[str]) -> Column:
    """A column of a CSV file: whole numbers if all are, else numbers (an empty place is NaN), else words."""
    for kind in (np.int64, np.float64):
        try:
            return np.array([value or "nan" for value in column]).astype(kind)
        except ValueError:
            continue
    return np.array(column)


def _check_known(name: str, columns: Mapping[str, Any]) -> None:
    if name not in columns:
        close = difflib.get_close_matches(name, columns, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(columns)}."
        raise FederationError(f"The table has no column {name!r}: {hint}")


def _numbers(name: str, column: Column) -> Column:
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


def _words(name: str, column: Column) -> Column:
    """The different words of a column, sorted."""
    if column.dtype.kind == "O" and not all(isinstance(value, str | bool) for value in column):
        raise FederationError(
            f"Column {name} has values that are neither numbers nor words, or has gaps: fill them, or leave it out."
        )
    return np.unique(column.astype(str))


def _standardized(column: Tensor, known: Tensor) -> Tensor:
    """A column with the training rows' mean and (population) deviation taken out; a constant one is only shifted."""
    std = known.std(correction=0)
    return (column - known.mean()) / (std if float(std) > 0 else 1.0)


def _item(sample: Any, key: str | int) -> Any:
    try:
        return sample[key]
    except (KeyError, IndexError, TypeError) as error:
        known = f"keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"{len(sample)} parts"
        raise FederationError(f"A sample has no {key!r}: it has {known}.") from error


def _stacked(values: list[Any], name: str) -> Any:
    arrays = [value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise FederationError(f"Samples have {name} of shapes {shapes[0]} and {shapes[1]}: bring them to one shape.")
    stacked = np.stack(arrays)
    return np.unique(stacked, return_inverse=True)[1] if stacked.dtype.kind in "OSU" and name == "targets" else stacked
