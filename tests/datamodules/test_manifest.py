"""Manifests: what they keep, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import (
    IID,
    ConceptShift,
    Digits,
    LabelSkew,
    Manifest,
    Multimodal,
    Partition,
    PartitionScheme,
    Pool,
    TensorFederation,
    Unimodal,
)
from fl_lightning.errors import FederationError

SHIFT = ConceptShift(LabelSkew([0.4, 0.3, 0.2, 0.1] + [0.0] * 6, 10))


class Halves(PartitionScheme):
    """A user's own scheme."""

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        return IID(2).split(pool, rng)


def write(data: Digits, path: Path, indices: bool = False) -> str:
    data.describe(indices).write(path)
    return str(path)


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("scheme", [Unimodal(20, 2), SHIFT, Multimodal([[0, 1], [2, 3]], [4, 2])], ids=repr)
def test_a_manifest_gives_the_same_partition_back(tmp_path: Path, scheme: PartitionScheme, indices: bool) -> None:
    data = Digits(partition=scheme, seed=5)
    path = write(data, tmp_path / "manifest.json", indices)
    again = Digits(manifest=path, seed=99)
    assert again.fingerprint == data.fingerprint
    assert again.federation.meta == data.federation.meta
    assert again.describe(indices) == data.describe(indices)
    assert Digits(manifest=path, partition=scheme).fingerprint == data.fingerprint


def test_a_scheme_with_tuples_is_the_one_that_its_manifest_has_in_lists(tmp_path: Path) -> None:
    scheme = Multimodal([[0, 1], [2, 3]], (4, 2))  # type: ignore[arg-type]
    path = write(Digits(partition=scheme), tmp_path / "manifest.json")
    assert Digits(manifest=path, partition=scheme).federation.num_clients == 6


def test_what_a_manifest_says(tmp_path: Path) -> None:
    data = Digits(partition=SHIFT, seed=5)
    stored = json.loads(Path(write(data, tmp_path / "m.json")).read_text())
    assert stored["data"] == "Digits"
    assert stored["seed"] == 5
    assert stored["clients"] == 10
    assert stored["scheme"]["scheme"] == "ConceptShift"
    assert stored["scheme"]["settings"]["partition"]["settings"]["base"][0] == 0.4
    assert stored["index_hash"] == data.dealt.index_hash
    assert stored["data_hash"] == data.data_hash
    assert stored["indices"] is None
    maps = data.federation.label_maps
    assert maps is not None
    assert stored["label_maps"] == maps.tolist()


def test_other_data_is_refused(tmp_path: Path) -> None:
    path = write(Digits(partition=IID(4)), tmp_path / "m.json")
    samples = Digits().samples
    inputs = samples.inputs.clone()
    assert TensorFederation(inputs, samples.targets, manifest=path).federation.num_clients == 4
    inputs[700, 0, 3, 3] += 1
    with pytest.raises(FederationError, match="made with other data"):
        TensorFederation(inputs, samples.targets, manifest=path).setup()


def test_another_partition_is_refused(tmp_path: Path) -> None:
    path = write(Digits(partition=IID(4)), tmp_path / "m.json")
    with pytest.raises(
        FederationError,
        match=r"holds IID\(clients=4, test_fraction=0.2, train_samples=None\) but .* has IID\(clients=5",
    ):
        Digits(partition=IID(5), manifest=path).setup()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"index_hash": "0"}, "do not match its hash"),
        ({"seed": 6}, "do not match its hash"),
        ({"format": 2}, "format 2"),
        ({"unknown": 1}, "not a manifest"),
        ({"scheme": {"scheme": "IID", "settings": {"clientz": 3}}}, "scheme is damaged"),
        ({"scheme": {"scheme": "Pool", "settings": {}}}, "damaged"),
        ({"indices": {"train": [[0]]}}, "indices are damaged"),
        ({"indices": {"train": [[0]], "test": [["x"]], "global_test": None}}, "indices are damaged"),
        ({"label_maps": [[1, 0]] * 4}, "do not match its hash"),
    ],
)
def test_a_changed_manifest_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "m.json"
    write(Digits(partition=IID(4), seed=5), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FederationError, match=says):
        Digits(manifest=str(path)).setup()


@pytest.mark.parametrize(
    ("text", "says"), [("{", "cannot be read"), ("[1]", "not a manifest"), ("3", "not a manifest")]
)
def test_a_file_that_is_no_manifest(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(FederationError, match=says):
        Digits(manifest=str(tmp_path / "m.json"))


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="There is no manifest"):
        Digits(manifest=str(tmp_path / "m.json"))


def test_a_scheme_that_is_not_the_librarys(tmp_path: Path) -> None:
    data = Digits(partition=Halves())
    path = write(data, tmp_path / "m.json")
    with pytest.raises(FederationError, match="Halves is not the library's"):
        Digits(manifest=path).setup()
    assert Digits(manifest=path, partition=Halves()).fingerprint == data.fingerprint
    whole = write(data, tmp_path / "whole.json", indices=True)
    assert Digits(manifest=whole).fingerprint == data.fingerprint


def test_own_lists_always_carry_their_indices(tmp_path: Path) -> None:
    x, y = torch.randn(10, 2), torch.arange(10) % 2
    data = TensorFederation(x, y, train=[[0, 1], [2]], test=[[3], [4]], global_test=[5, 6])
    manifest = data.describe()
    assert manifest.indices == {"train": [[0, 1], [2]], "test": [[3], [4]], "global_test": [5, 6]}
    assert manifest.scheme_call == "own indices"
    manifest.write(tmp_path / "m.json")
    assert TensorFederation(x, y, manifest=str(tmp_path / "m.json")).fingerprint == data.fingerprint


def test_schemes_compare_by_their_settings() -> None:
    assert IID(3) == IID(3) != IID(4)
    assert hash(IID(3)) == hash(IID(3))
    assert ConceptShift(IID(3)) != ConceptShift(IID(4))
    assert repr(IID(3)) == "IID(clients=3, test_fraction=0.2, train_samples=None)"
    assert Manifest.of("x", "y", SHIFT, 0, SHIFT(torch.arange(200) % 10, 0)).build_scheme() == SHIFT
