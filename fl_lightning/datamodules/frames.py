"""Users' own data: arrays with a column of clients, tables with named columns, map-style data sets."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fl_lightning.datamodules.base import Samples
from fl_lightning.datamodules.partitions.base import PartitionScheme
from fl_lightning.datamodules.partitions.users import ByUser
from fl_lightning.datamodules.strata import is_classes
from fl_lightning.datamodules.tables import Column, columns_of, numbers_of, read_table, words_of
from fl_lightning.datamodules.tensors import TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex
from fl_lightning.ranges import Part, PositiveShare, ShareBelowOne, TwoOrMore


class FromArrays(TensorFederation):
    """Arrays with a column of clients.

    Args:
        inputs: all samples, shape (n, ...): an array, a tensor, or the path of a ``.npy`` file, which is memory-mapped.
        targets: the targets, shape (n, ...), given like the inputs.
        clients: client of each row, shape (n,); None deals the samples by ``partition``.
        test_fraction: fraction of each client's samples held out for testing.
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
        test_fraction: Part = 0.2,
        min_samples: TwoOrMore = 2,
        **kwargs: Any,
    ) -> None:
        dealt = _dealt(clients, test_fraction, min_samples, kwargs)
        super().__init__(_mapped(inputs, "inputs"), _mapped(targets, "targets"), **dealt)


def _dealt(clients: Any, test_fraction: float, min_samples: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with index lists made from the column of clients, if there is one."""
    if clients is None:
        return dict(options)
    scheme = options.get("partition")
    if scheme is not None and not isinstance(scheme, ByUser):
        raise FederationError(
            f"Samples are dealt by their clients or by {type(scheme).__name__}, not both: leave one of them out."
        )
    column = clients.cpu().numpy() if isinstance(clients, Tensor) else np.asarray(clients, dtype=object)
    if column.ndim != 1:
        raise FederationError(f"clients must be one column with a client for each sample, not of shape {column.shape}.")
    users = column.tolist()
    if any(user is None or user != user or user == "" for user in users):
        raise FederationError("Some samples have no client: drop them or assign one.")
    if len({type(user) for user in users}) > 1:
        users = [str(user) for user in users]
    return {**options, "users": users, "partition": scheme or ByUser(None, min_samples, test_fraction)}


def _mapped(values: Any, name: str) -> Any:
    """Return the values, memory-mapped if given as the path of a ``.npy`` file."""
    if not isinstance(values, str | Path):
        return values
    try:
        array: Any = np.load(values, mmap_mode="r")
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays")
        if not array.dtype.isnative:
            raise ValueError(f"its numbers are {array.dtype}, in another byte order")
    except (OSError, ValueError) as error:
        raise FederationError(f"{name}: {values} cannot be read as a .npy file ({error}).") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only
        return torch.from_numpy(array)


class FromFrame(TensorFederation):
    """A table with a column of clients, feature columns and target columns.

    Numbers are standardised with the mean and standard deviation of the training rows; columns of words are one-hot
    encoded with the words of the training rows.

    Args:
        table: a pandas or polars DataFrame, an Arrow table, a structured array, or a dict of columns.
        client: the column of clients; None deals the rows by ``partition``.
        target: the target column, or several columns of numbers.
        features: the feature columns; None takes all others.
        categorical: columns of numbers to treat as words.
        stratify: a column that ``partition`` deals by, with ``client=None``.
        standardize: whether to standardise numbers.
        test_fraction: fraction of each client's rows held out for testing.
        min_samples: clients with fewer rows are left out.
        **kwargs: as for :class:`~fl_lightning.datamodules.TensorFederation`.

    Attributes:
        classes: the class names of a target of words; empty for numbers.
        feature_names: names of the net's inputs.

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
        test_fraction: Part = 0.2,
        min_samples: TwoOrMore = 2,
        **kwargs: Any,
    ) -> None:
        columns = columns_of(table)
        wanted = _names("target", [target] if isinstance(target, str) else target)
        named = [*wanted, *(name for name in (client, stratify) if name is not None)]
        rest = [name for name in columns if name not in named]
        chosen = rest if features is None else _names("features", features)
        for name in (*named, *chosen, *_names("categorical", categorical)):
            _check_known(name, columns)
        if leaking := sorted(set(chosen) & set(wanted)):
            raise FederationError(f"{leaking[0]} is both a feature and a target: take it out of features.")
        if client in wanted:
            raise FederationError(f"{client} is the column of clients and cannot be the target: name another target.")
        if not wanted or not chosen:
            what, option = ("predict from", "features") if wanted else ("predict", "target")
            raise FederationError(f"The table has no columns to {what}: name some as {option}.")
        self.standardized, self.classes = standardize, list[str]()
        self._words = {
            n: words_of(n, columns[n]) for n in chosen if columns[n].dtype.kind in "OSUb" or n in categorical
        }
        self._names = chosen
        values = [self._codes(name, columns[name]) for name in chosen]
        if stratify is not None:
            kwargs["stratify"] = columns[stratify]
        dealt = _dealt(None if client is None else columns[client], test_fraction, min_samples, kwargs)
        super().__init__(np.stack(values, axis=1), self._targets(wanted, columns), **dealt)

    def _codes(self, name: str, column: Column) -> Column:
        """Encode a column as numbers; words by their index in the sorted vocabulary."""
        if name in self._words:
            return np.searchsorted(self._words[name], column.astype(str)).astype(np.float64)
        return numbers_of(name, column)

    def _targets(self, names: list[str], columns: Mapping[str, Column]) -> Column:
        """Return the targets: words as classes, integers unchanged, other numbers as floats."""
        first = columns[names[0]]
        if len(names) > 1:
            return np.stack([numbers_of(name, columns[name]) for name in names], axis=1).astype(np.float32)
        if first.dtype.kind in "OSUb":
            words = words_of(names[0], first)
            self.classes = words.tolist()
            return np.searchsorted(words, first.astype(str))
        numbers = numbers_of(names[0], first)
        return first.astype(np.int64) if is_classes(first) else numbers.astype(np.float32)

    def encode(self, samples: Samples, train: ClientIndex) -> Tensor:
        """Standardise numbers and one-hot encode words, fitted on the training rows."""
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
        """Return the preprocessing of the rows, for the fingerprint."""
        return "" if self.standardized else "not standardised"

    @property
    def feature_names(self) -> list[str]:
        """Names of the net's inputs; words that occur in no training row are left out."""
        _ = self.federation
        return self._inputs

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample's inputs."""
        return (len(self.feature_names),)

    @input_shape.setter
    def input_shape(self, value: tuple[int, ...]) -> None:
        """Ignored: the shape follows from the training rows."""


class Table(FromFrame):
    """A CSV or Parquet file with a column of clients; see :class:`FromFrame`.

    On the command line: ``--data Table --data.path patients.csv --data.client hospital --data.target los``.

    Args:
        path: the file, ``.csv`` (with a header) or ``.parquet``.
        client: the column of clients; None deals the rows by ``partition``.
        target: the target column, or several columns of numbers.
        features: the feature columns; None takes all others.
        categorical: columns of numbers to treat as words.
        standardize: whether to standardise numbers with the training rows' mean and standard deviation.
        test_fraction: fraction of each client's rows held out for testing.
        min_samples: clients with fewer rows are left out.
        partition: how rows are dealt if ``client`` is None.
        fraction: fraction of clients that train in a round.
        val_fraction: fraction of each client's training rows held out for validation. Default: 0.2.
        seed: seed of the splits and the cohorts. Default: the seed of ``seed_everything``.
    """

    def __init__(
        self,
        path: str,
        client: str | None,
        target: str | list[str],
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        standardize: bool = True,
        test_fraction: Part = 0.2,
        min_samples: TwoOrMore = 2,
        partition: PartitionScheme | None = None,
        fraction: PositiveShare = 1.0,
        val_fraction: ShareBelowOne | None = None,
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
    """A map-style data set of PyTorch or Hugging Face, read once and held in memory.

    Args:
        dataset: a map-style data set whose samples are pairs, tuples or dicts.
        client: key or index of the client in a sample, or a function of the sample; None deals the samples by
            ``partition``.
        inputs: key or index of the inputs.
        target: key or index of the target.
        test_fraction: fraction of each client's samples held out for testing.
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
        test_fraction: Part = 0.2,
        min_samples: TwoOrMore = 2,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, Mapping):
            raise FederationError(
                f"FromDataset needs one data set, not a dict of them: choose one of {', '.join(dataset)}."
            )
        try:
            samples = [dataset[i] for i in range(len(dataset))]
        except TypeError as error:
            raise FederationError(
                f"FromDataset needs a map-style data set, with a length and indices: {error}."
            ) from error
        if not samples:
            raise FederationError("The data set has no samples.")
        clients = None if client is None else [_client(sample, client) for sample in samples]
        super().__init__(
            _stacked([_item(sample, inputs) for sample in samples], "inputs"),
            _stacked([_item(sample, target) for sample in samples], "targets"),
            **_dealt(clients, test_fraction, min_samples, kwargs),
        )


def _check_known(name: str, columns: Mapping[str, Any]) -> None:
    if name not in columns:
        close = difflib.get_close_matches(name, columns, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(columns)}."
        raise FederationError(f"The table has no column {name!r}: {hint}")


def _standardized(column: Tensor, known: Tensor) -> Tensor:
    """Standardise a column by the training rows' mean and (population) deviation; a constant one is only centred."""
    std = known.std(correction=0)
    return (column - known.mean()) / (std if float(std) > 0 else 1.0)


def _names(option: str, names: Any) -> list[str]:
    """Check names of columns, each given once."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise FederationError(f"{option} must be a list of column names, not {names!r}.")
    found = [str(name) for name in names]
    if twice := [name for name in found if found.count(name) > 1]:
        raise FederationError(f"{option} names {twice[0]} twice.")
    return found


def _client(sample: Any, client: Any) -> Any:
    """Return the client of a sample."""
    try:
        found = client(sample) if callable(client) else _item(sample, client)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FederationError(f"client cannot be computed from a sample ({error!r}) of {type(sample)}.") from error
    return found.item() if isinstance(found, Tensor | np.generic) else found


def _item(sample: Any, key: str | int) -> Any:
    try:
        return sample[key]
    except (KeyError, IndexError, TypeError) as error:
        known = f"it has {len(sample)} parts" if isinstance(sample, Sized) else f"it is of {type(sample)}"
        if isinstance(sample, Mapping):
            known = f"it has keys {', '.join(map(str, sample))}"
        raise FederationError(f"A sample has no {key!r}: {known}.") from error


def _array(value: Any, name: str) -> Column:
    """Convert a value to an array; PIL images used as inputs become channels first."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # type: ignore[no-any-return]
    array = np.asarray(value)
    if hasattr(value, "getbands") and name == "inputs":
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return array


def _stacked(values: list[Any], name: str) -> Any:
    if None in (kinds := {None if value is None else type(value) for value in values}):
        raise FederationError(f"Some samples have no {name}: drop them or fill them in.")
    arrays = [_array(value, name) for value in values]
    if len(kinds) > 1 and len({array.dtype.kind in "OSU" for array in arrays}) > 1:
        raise FederationError(f"Samples have {name} of several types: convert them to one.")
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise FederationError(f"Samples have {name} of shapes {shapes[0]} and {shapes[1]}: make the shapes equal.")
    stacked = np.stack(arrays)
    return np.unique(stacked, return_inverse=True)[1] if stacked.dtype.kind in "OSU" and name == "targets" else stacked
