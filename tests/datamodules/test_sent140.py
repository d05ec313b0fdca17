"""Sentiment140: files, cache, vocabulary, vectors."""

from __future__ import annotations

import importlib.util
import ssl
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchtext", reason="needs the text extra")

from fl_lightning.datamodules import IID, ByUser, DominantClass, Sent140, corpus, sent140
from fl_lightning.datamodules.tweets import mask, tokenize
from fl_lightning.errors import FederationError
from tests.support import tweets
from tests.support.tweets import WORDS, row


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tweets.write(tmp_path)


def data(root: Path, **kwargs: Any) -> Sent140:
    return Sent140(**{"root": str(root), "partition": ByUser(5, 20), **kwargs})


def test_tweets_are_padded_tokens(root: Path) -> None:
    module = data(root)
    assert module.num_classes == 2
    assert module.input_shape == (40,)
    federation = module.federation
    assert federation.inputs.shape == (304, 40)
    assert federation.inputs.dtype == torch.int64
    assert module.samples.train_size == 300
    assert federation.targets[300:].tolist() == [0, 1, 1, 0]  # the neutral row is gone
    assert mask(federation.inputs).sum(dim=1)[:300].tolist() == [7] * 300
    assert torch.equal(Sent140.mask(federation.inputs), mask(federation.inputs))
    assert int(federation.inputs.max()) < module.num_embeddings == 20_002
    x, y = federation.gather([0], federation.train[0][None, :3], torch.float32)
    assert x.dtype == torch.int64
    assert y.shape == (1, 3)


def test_tokens_read_back_as_the_tweets(root: Path) -> None:
    module = data(root)
    itos, texts = module.federation and module.vocab.itos, list(corpus.read_rows(module.folder / corpus.TRAIN_FILE))
    for i in (0, 57, 299):
        words = tokenize(texts[i][2])
        back = [itos[t] for t in module.federation.inputs[i].tolist()]
        assert [b for b in back if b != "<pad>"] == [w if w in module.vocab.stoi else "<unk>" for w in words]


def test_vocabulary_is_of_training_tweets_of_training_clients_alone(root: Path) -> None:
    for extra in ({}, {"val_fraction": 0.2}):
        module = data(root, **extra)
        federation = module.federation
        texts = [text for _, _, text in corpus.read_rows(module.folder / corpus.TRAIN_FILE)]
        seen = Counter(w for i in federation.train.flat.tolist() for w in tokenize(texts[i]))
        assert set(module.vocab.itos[2:]) == set(seen)
        assert module.vocab.itos[:2] == ["<pad>", "<unk>"]
        assert module.vocab.itos[2] == max(sorted(seen), key=lambda w: seen[w])
        outside = {f"only{i}" for i in range(300)} - set(seen)
        assert len(outside) == 300 - len(federation.train.flat)
        for i in federation.test.flat.tolist():
            assert int(federation.inputs[i, 6]) == sent140.UNKNOWN


def test_vocabulary_size_and_frequency(root: Path) -> None:
    assert len(data(root, vocab_size=5).federation.inputs.unique()) == 5 + 2
    module = data(root, min_freq=2)
    assert module.federation
    assert set(module.vocab.itos[2:]) == set(WORDS)


def test_length_cuts_and_pads(root: Path) -> None:
    short = data(root, length=3)
    assert short.federation.inputs.shape == (304, 3)
    assert bool(mask(short.federation.inputs).all())


def test_clients_are_users_by_name(root: Path) -> None:
    module = data(root)
    names = module.federation.meta["user"]
    assert all(name.startswith("user") for name in names)
    owners = [user for _, user, _ in corpus.read_rows(module.folder / corpus.TRAIN_FILE)]
    for client, name in enumerate(names):
        assert {owners[i] for i in module.federation.train[client].tolist()} == {name}


def test_by_the_dominant_class_scheme(root: Path) -> None:
    federation = data(root, partition=DominantClass(4, 0.8, 10)).federation
    assert federation.meta["dominant_class"] == [0, 1, 0, 1]
    share = [float((federation.targets[federation.train[k]] == k % 2).float().mean()) for k in range(4)]
    assert min(share) > 0.7


def test_without_the_manual_test_file(root: Path) -> None:
    (root / "sentiment140" / corpus.TEST_FILE).unlink()
    module = data(root)
    assert len(module.federation.inputs) == 300
    assert module.federation.global_test is None


def caches(root: Path) -> list[Path]:
    return sorted((root / "sentiment140" / "cache").glob("tokens-*.npz"))


def test_cache_is_used_and_keyed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data(root).fingerprint
    assert len(caches(root)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_build", None)
        assert data(root).fingerprint == first
        assert data(root, vocab_size=9, length=4, partition=IID(3)).federation
    assert data(root, min_freq=2).fingerprint != first
    data(root, skip_malformed=True).setup()
    assert len(caches(root)) == 2
    monkeypatch.setattr("fl_lightning.datamodules.tweets.VERSION", 99)
    data(root).setup()
    assert len(caches(root)) == 3
    with (root / "sentiment140" / corpus.TRAIN_FILE).open("a", encoding="latin-1") as file:
        file.write(row(0, "user1", "new"))
    assert data(root).fingerprint != first
    assert len(caches(root)) == 4
    assert not list((root / "sentiment140" / "cache").glob("*.part"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text", "other"])
def test_a_damaged_cache_is_built_again(root: Path, damage: str) -> None:
    first = data(root).fingerprint
    (cache,) = caches(root)
    sound = cache.read_bytes()
    if damage == "other":
        with np.load(cache) as stored:
            np.savez(cache, **{**stored, "offsets": stored["offsets"][:-1]})
    else:
        middle = len(sound) // 3
        cache.write_bytes(
            {
                "truncate": sound[: len(sound) // 2],
                "flip": sound[:middle] + bytes(255 - b for b in sound[middle : middle + 40]) + sound[middle + 40 :],
                "empty": b"",
                "text": b"no cache",
            }[damage]
        )
    with pytest.warns(UserWarning, match="damaged"):
        assert data(root).fingerprint == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data(root).fingerprint == first


def test_a_folder_that_cannot_be_written_is_no_obstacle(root: Path) -> None:
    (root / "sentiment140" / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="could not be cached"):
        assert data(root).federation.num_clients == 5


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('"0","1","date","NO_QUERY","user1"\n', "Row 11 .* 5 columns rather than 6"),
        ('"3","1","date","NO_QUERY","user1","text"\n', "label '3', not 0, 2 or 4"),
        ('"0","1","date,"NO_QUERY,"user1,"text"\n', "Row 11"),
        ("garbage\n", "1 columns rather than 6"),
        ("0,1,date,NO_QUERY,user1,a\rb\n", "Row 11 .* 1 columns"),
        (f"0,1,date,NO_QUERY,user1,{'a' * 140_000}\n", "Row 11 .* 1 columns"),
        ('"0","1","date","NO_QUERY","user1","a","b"\n', "7 columns"),
    ],
)
def test_malformed_rows(root: Path, line: str, says: str) -> None:
    path = root / "sentiment140" / corpus.TRAIN_FILE
    lines = path.read_text(encoding="latin-1").splitlines(keepends=True)
    path.write_text("".join([*lines[:10], line, *lines[10:]]), encoding="latin-1")
    with pytest.raises(FederationError, match=f"{says}.*skip_malformed=True"):
        data(root).setup()
    assert len(data(root, skip_malformed=True).federation.inputs) == 304


def test_quotes_commas_blank_lines_and_carriage_returns(root: Path) -> None:
    path = root / "sentiment140" / corpus.TRAIN_FILE
    path.write_bytes(b'"0","1","d","q","u","say ""hi"", you\0"\r\n\r\n"4","1","d","q","u","\xe9"\r\n')
    assert list(corpus.read_rows(path)) == [(0, "u", 'say "hi", you '), (1, "u", "\xe9")]


def test_files_that_are_missing_or_empty(tmp_path: Path, root: Path) -> None:
    with pytest.raises(FederationError, match=f"There is no {corpus.TRAIN_FILE} in .*FL_LIGHTNING_DATA"):
        data(tmp_path / "nowhere").setup()
    (root / "sentiment140" / corpus.TRAIN_FILE).write_text(row(2, "u", "neutral"))
    with pytest.raises(FederationError, match="no usable row"):
        data(root).setup()


def test_users_with_too_few_tweets(root: Path) -> None:
    with pytest.raises(FederationError, match="the busiest has 30"):
        data(root, partition=ByUser(5, 31)).setup()


def test_without_the_text_extra(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(sent140, "find_spec", lambda name: None if name == "torchtext" else real(name))
    with pytest.raises(FederationError, match=r"install the text extra, pip install 'fl-lightning\[text\]'"):
        data(root)


def test_vectors_of_a_local_file(root: Path) -> None:
    glove = root / "glove.txt"
    glove.write_text("good 1.0 2.0 3.0\nsun 4.0 5.0 6.0\nelsewhere 7.0 8.0 9.0\n")
    context = ssl._create_default_https_context
    module = data(root, vectors=str(glove))
    table = module.embeddings
    assert table is not None
    assert table.shape == (20_002, 3)
    assert table[module.vocab.stoi["good"]].tolist() == [1, 2, 3]
    assert table[module.vocab.stoi["sun"]].tolist() == [4, 5, 6]
    assert int(table.any(dim=1).sum()) == 2
    assert ssl._create_default_https_context is context
    (cache,) = (root / "sentiment140" / "cache").glob("vectors-*/*.pt")
    cache.write_bytes(b"damaged")
    again = data(root, vectors=str(glove)).embeddings
    assert again is not None
    assert torch.equal(again, table)
    assert data(root).embeddings is None


def test_vectors_that_are_none(root: Path) -> None:
    with pytest.raises(FederationError, match="no file of word vectors"):
        data(root, vectors=str(root / "missing.txt"))
    (root / "bad.txt").write_text("a 1.0 2.0 3.0\nb 1.0\nc 1.0 2.0\n")
    with pytest.raises(FederationError, match="not a file of word vectors"):
        _ = data(root, vectors=str(root / "bad.txt")).embeddings


@pytest.mark.parametrize("wrong", [{"vocab_size": 0}, {"length": 0}])
def test_sizes_below_one(root: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(FederationError, match="must be 1 or more, not 0"):
        data(root, **wrong)


def test_the_real_files(real_data: Path) -> None:
    """Counts of whatever files are there, against a plain reading of them."""
    folder = real_data / "sentiment140"
    if not (folder / corpus.TRAIN_FILE).is_file():
        pytest.skip(f"Sentiment140 is not in {real_data}")
    module = Sent140(root=str(real_data), partition=DominantClass(50, 0.8))
    federation = module.federation
    raw = (folder / corpus.TRAIN_FILE).read_bytes().splitlines()
    assert module.samples.train_size == len(raw)
    positive = sum(line.startswith(b'"4"') for line in raw)
    assert int(federation.targets[: len(raw)].sum()) == positive
    assert len(federation.targets) - len(raw) == 359  # 498 rows less 139 neutral ones
    assert len(module.vocab.itos) == 20_002
    assert int(mask(federation.inputs).sum(dim=1).min()) >= 1
    unknown = (federation.inputs == sent140.UNKNOWN).sum() / mask(federation.inputs).sum()
    assert unknown < 0.05
