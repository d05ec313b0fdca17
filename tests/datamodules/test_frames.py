"""Users' own arrays, tables and data sets; scikit-learn says what encoded columns are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch.utils.data import Dataset, TensorDataset

from fl_lightning.datamodules import IID, FromArrays, FromDataset, FromFrame, Table, TensorFederation
from fl_lightning.engine import Job, make_engine
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.nets import MLP
from fl_lightning.tasks import Regression
from tests.support import fit, mlp

ROWS = 40
#: The first line of a small file.
HEAD = "site,days,age\n"


def columns(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "site": np.array(["north", "south", "west", "east"])[np.arange(ROWS) % 4],
        "age": rng.integers(20, 90, ROWS),
        "weight": rng.normal(70, 15, ROWS),
        "ward": np.array(["a", "b", "c"])[rng.integers(0, 3, ROWS)],
        "grade": rng.integers(1, 4, ROWS),
        "days": rng.gamma(2, 3, ROWS),
    }


def test_columns_are_encoded_as_by_scikit_learn() -> None:
    """Scales and words are learned from training rows alone."""
    table = columns()
    data = FromFrame(table, client="site", target="days", categorical=["grade"], seed=0)
    federation = data.federation
    train = federation.train.flat.numpy()
    numbers, words = (
        np.stack([table["age"], table["weight"]], 1),
        np.stack([table["ward"], table["grade"].astype(str)], 1),
    )
    scaled = StandardScaler().fit(numbers[train]).transform(numbers)
    coded = OneHotEncoder(sparse_output=False, handle_unknown="ignore").fit(words[train]).transform(words)
    np.testing.assert_allclose(federation.inputs, np.concatenate([scaled, coded], 1), atol=1e-6)
    assert data.feature_names == ["age", "weight", "ward=a", "ward=b", "ward=c", "grade=1", "grade=2", "grade=3"]
    assert data.input_shape == (8,)
    assert federation.meta["user"] == ["east", "north", "south", "west"]
    np.testing.assert_allclose(federation.targets, table["days"].astype(np.float32))
    owners = [set(table["site"][index]) for index in (*federation.train, *federation.test)]
    assert owners == [{name} for name in ("east", "north", "south", "west")] * 2


def test_a_word_that_no_training_row_has_is_no_column() -> None:
    table = columns()
    data = FromFrame(table, client="site", target="days", features=["ward"], seed=0)
    held = int(data.federation.test.flat[0])
    table["ward"] = table["ward"].astype("<U6")
    table["ward"][held] = "attic"
    again = FromFrame(table, client="site", target="days", features=["ward"], seed=0)
    assert again.feature_names == ["ward=a", "ward=b", "ward=c"]
    assert again.federation.inputs[held].tolist() == [0, 0, 0]


def test_targets_are_classes_or_numbers() -> None:
    table = columns()
    words = FromFrame(table, client="site", target="ward")
    assert (words.classes, words.num_classes) == (["a", "b", "c"], 3)
    assert np.array_equal(np.array(words.classes)[words.federation.targets], table["ward"])
    assert FromFrame({**table, "grade": table["grade"] - 1}, client="site", target="grade").num_classes == 3
    assert (words.outputs, FromFrame(table, client="site", target="days").outputs) == (3, 1)
    two = FromFrame(table, client="site", target=["days", "age"])
    assert two.outputs == 2
    assert two.federation.targets.shape == (ROWS, 2)
    assert two.feature_names[0] == "weight"
    negative = {**table, "grade": table["grade"] - 2}
    assert FromFrame(negative, client="site", target="grade").federation.targets.dtype == torch.float32


def test_rows_without_clients_are_dealt() -> None:
    data = FromFrame(columns(), client=None, target="days", features=["age"], partition=IID(5), stratify="ward")
    assert data.federation.num_clients == 5
    assert set(data.samples.labels.tolist()) == {0, 1, 2}


def test_every_kind_of_table_is_the_same() -> None:
    table = columns()
    expected = FromFrame(table, client="site", target="days").federation.inputs
    kinds: list[Any] = [np.rec.fromarrays(list(table.values()), names=list(table))]
    kinds.append(Columns(table))
    for kind in kinds:
        assert torch.equal(FromFrame(kind, client="site", target="days").federation.inputs, expected)


def test_pandas_and_polars_and_arrow() -> None:
    table = columns()
    expected = FromFrame(table, client="site", target="days").federation.inputs
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(table).astype({"ward": "category"})
    assert torch.equal(FromFrame(frame, client="site", target="days").federation.inputs, expected)
    pyarrow = pytest.importorskip("pyarrow")
    arrow = pyarrow.table(table)
    for given in (arrow, Only(arrow, "__arrow_c_stream__"), Only(frame, "__dataframe__")):
        assert torch.equal(FromFrame(given, client="site", target="days").federation.inputs, expected)
    polars = pytest.importorskip("polars")
    for given in (polars.DataFrame(table), polars.DataFrame(table).lazy()):
        assert torch.equal(FromFrame(given, client="site", target="days").federation.inputs, expected)


class Only:
    """A table that offers one protocol and nothing else."""

    def __init__(self, table: Any, protocol: str) -> None:
        self.table, self.protocol = table, protocol

    def __getattr__(self, name: str) -> Any:
        if name != self.protocol:
            raise AttributeError(name)
        return getattr(self.table, name)


class Columns:
    """The part of a DataFrame that is used."""

    def __init__(self, table: dict[str, np.ndarray]) -> None:
        self.table, self.columns = table, list(table)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.table[name]


def test_files_are_read(tmp_path: Path) -> None:
    table = columns()
    lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    data = Table(str(path), "site", "days", val_fraction=0)
    expected = FromFrame(table, client="site", target="days", val_fraction=0).federation
    assert torch.equal(data.federation.inputs, expected.inputs)
    assert torch.equal(data.federation.targets, expected.targets)
    path.write_text("\n".join([*lines, "north,3"]))
    with pytest.raises(FederationError, match=r"has 2 columns in line 42, but 6 in the first"):
        Table(str(path), "site", "days")


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({}, {"client": "sites"}, r"no column 'sites': did you mean site\?"),
        ({}, {"client": "zzz"}, r"no column 'zzz': it has site, age"),
        ({}, {"features": ["days"]}, r"days is both a feature and a target"),
        ({"age": np.full(ROWS, np.nan)}, {}, r"Column age has 40 of 40 values missing or not finite"),
        ({"days": np.full(ROWS, np.inf)}, {}, r"Column days has 40 of 40"),
        ({"age": np.array([None, 3] * 20)}, {}, r"Column age has gaps or values that are neither"),
        ({"age": np.arange(ROWS).astype("datetime64[D]")}, {}, r"Column age holds datetime64.*, not numbers"),
        ({"age": np.arange(3)}, {}, r"columns differ in length"),
        ({"site": np.array([None, "a"] * 20)}, {}, r"Some samples have no client"),
        ({}, {"target": ["ward", "days"]}, r"Column ward holds .*, not numbers"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(change: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        FromFrame({**columns(), **change}, **{"client": "site", "target": "days", **options})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: Table(str(p / "none.csv"), "site", "days"), r"There is no file .*none.csv"),
        (lambda p: Table(str(p), "site", "days"), r"There is no file"),
        (lambda p: Table(file(p, "x.txt", "a"), "site", "days"), r"is not a table: use a .csv"),
        (lambda p: Table(file(p, "x.csv", ""), "site", "days"), r"x.csv has no rows"),
        (lambda p: Table(file(p, "x.csv", "site,days\n"), "site", "days"), r"x.csv has no rows"),
        (lambda p: Table(file(p, "x.csv", "site;days\na;1\n"), "site", "days"), r"separates columns by semicolons"),
        (lambda p: Table(file(p, "x.csv", "a,b,b\n1,2,3\n"), "a", "b"), r"several columns called 'b'"),
        (lambda p: Table(file(p, "x.csv", b"site,days\n\xfc,1\n"), "site", "days"), r"x.csv is not UTF-8 text"),
        (lambda p: Table(file(p, "x.csv", f"{HEAD}a,1,\na,2,3\n"), "site", "days"), r"Column age has 1 of 2 values"),
        (lambda p: Table(file(p, "x.csv", f"{HEAD}a,1,NA\na,2,3\n"), "site", "days"), r"Column age has 1 of 2 values"),
        (lambda p: Table(file(p, "x.csv", f"{HEAD}a,1,f\na,2,\n"), "site", "days"), r"Column age has gaps"),
        (lambda p: Table(file(p, "x.csv", f"{HEAD},1,2\na,2,3\n"), "site", "days"), r"Some samples have no client"),
        (lambda p: FromFrame(columns(), client="site", target=[]), r"no columns to predict: name some as target"),
        (lambda p: FromFrame(columns(), client="site", target=None), r"target must be a text or a list"),  # type: ignore[arg-type]
        (lambda p: FromFrame(columns(), client="site", target="site"), r"site is the column of clients"),
        (lambda p: FromFrame(columns(), "site", "days", features="age"), r"features must be a list"),
        (lambda p: FromFrame(columns(), "site", "days", features=["age", "age"]), r"features names age twice"),
        (lambda p: FromFrame(columns(), "site", "days", partition=IID(3)), r"by their clients or by IID, not both"),
        (lambda p: FromArrays(np.ones((4, 2)), [0, 1] * 2, clients=np.ones((4, 2))), r"clients must be one column"),
        (lambda p: FromArrays(np.ones((4, 2)), [0, 1] * 2, clients="site"), r"clients must be one column"),
        (lambda p: FromArrays(saved(p, np.ones(3, dtype=">f4")), [0] * 3), r"its numbers are >f4, in another byte"),
        (lambda p: FromDataset({"train": [1]}), r"one data set, not a dict of them: choose one of train"),
        (lambda p: FromDataset([]), r"The data set has no samples"),
        (lambda p: FromDataset([1.0]), r"A sample has no 0: it is of <class 'float'>"),
        (lambda p: FromDataset([([1.0], 0)], client=lambda s: s["who"]), r"client cannot be computed from a sample"),
        (lambda p: FromDataset([([1.0], 0), ([1.0], None)]), r"Some samples have no targets"),
        (lambda p: FromDataset([([1.0], 0, "a")] * 8, client=2, partition=IID(2)), r"by their clients or by IID"),
        (lambda p: FromFrame(3, client="a", target="b"), r"A table is a DataFrame.* not int"),
        (lambda p: FromFrame({"a": [], "b": []}, client="a", target="b"), r"The table has no rows"),
        (lambda p: FromArrays(str(p / "x.npy"), [1]), r"inputs: .*x.npy cannot be read as a .npy file"),
        (lambda p: FromDataset(3), r"needs a map-style data set"),
        (lambda p: FromDataset([{"x": 1, "y": 2}], client="z", inputs="x", target="y"), r"no 'z': it has keys x, y"),
        (lambda p: FromDataset([([1], 0), ([1, 2], 0)]), r"inputs of shapes \(1,\) and \(2,\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(call: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=sentence):
        call(tmp_path)


def file(folder: Path, name: str, text: str | bytes) -> str:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return str(folder / name)


def saved(folder: Path, array: np.ndarray) -> str:
    np.save(folder / "x.npy", array)
    return str(folder / "x.npy")


def test_a_file_is_held_out_of_as_other_data(tmp_path: Path) -> None:
    rows = "".join(f"{'ab'[i % 2]},{i % 5},{i}\n" for i in range(20))
    data = Table(file(tmp_path, "x.CSV", f"{HEAD}{rows}\n\n"), "site", "days")
    assert data.val_fraction == 0.2
    assert data.federation.val is not None
    assert len(data.samples.targets) == 20  # blank lines are no rows


def test_codes_with_leading_zeros_are_words(tmp_path: Path) -> None:
    """Clients 007 and 7 are two."""
    rows = "".join(f"{'007' if i % 2 else '7'},{i % 3},0.{i}\n" for i in range(12))
    data = Table(file(tmp_path, "x.csv", HEAD + rows), "site", "days")
    assert data.federation.meta["user"] == ["007", "7"]
    assert data.feature_names == ["age"]


def test_whole_numbers_are_targets_of_a_regression() -> None:
    """Also if they begin at 1, are far apart, or are below 0; a net is refused by what the task says."""
    for days in (np.arange(ROWS) % 7 + 1, 10**6 * (np.arange(ROWS) + 1), np.arange(ROWS) - 20):
        data = FromFrame({**columns(), "days": days}, client="site", target="days", seed=0)
        method = FedAvg(MLP(data.input_shape[0], (), 1), task="Regression", engine="sequential")
        fit(method, data, 1)
        assert Regression().outputs(data.federation.targets) == 1
    assert FromFrame({**columns(), "days": 10**6 * np.arange(ROWS)}, client="site", target="days").num_classes == 0


def test_images_have_their_channels_first() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (8, 4, 5, 3)).astype(np.uint8)
    rows = [
        {"x": image.fromarray(p), "y": image.fromarray(p[:, :, 0]), "who": "ab"[i % 2]} for i, p in enumerate(pixels)
    ]
    federation = FromDataset(rows, client="who", inputs="x", target="y").federation
    assert np.array_equal(federation.inputs, pixels.transpose(0, 3, 1, 2))
    assert np.array_equal(federation.targets, pixels[:, :, :, 0])  # a mask is as it is


class Rows(Dataset[Any]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor, who: list[str]) -> None:
        self.x, self.y, self.who = x, y, who

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.x[i], "label": int(self.y[i]), "writer": self.who[i]}


def test_data_sets_are_read() -> None:
    x, y, who = torch.rand(12, 1, 3, 3), torch.arange(12) % 3, ["p", "q", "r"] * 4
    expected = FromArrays(x, y, clients=who, seed=0).federation
    named = FromDataset(Rows(x, y, who), client="writer", inputs="image", target="label", seed=0).federation
    placed = FromDataset(
        TensorDataset(x, y), client=lambda s: who[int((x == s[0]).flatten(1).all(1).nonzero()[0])], seed=0
    )
    for found in (named, placed.federation):
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)
        assert torch.equal(found.train.flat, expected.train.flat)
    words = FromDataset([([float(i)], ["no", "yes"][i % 2]) for i in range(8)], partition=IID(2))
    assert words.federation.targets.tolist() == [0, 1] * 4


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_files_mapped_into_memory_train_alike(engine: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 20, generator=generator), torch.randint(4, (60,), generator=generator)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", y.numpy())
    mapped = FromArrays(tmp_path / "x.npy", tmp_path / "y.npy", partition=IID(3), seed=0)
    held = TensorFederation(x, y, partition=IID(3), seed=0)
    assert mapped.fingerprint == held.fingerprint
    module = FedAvg(mlp(), epochs=2, seed=0)
    jobs = [Job(client, module.server_state()) for client in range(3)]
    runs = [make_engine(engine).train(module, data.federation, jobs, 0) for data in (mapped, held)]
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
