"""Sentiment140's files as arrays of token numbers, cached on disk."""

from __future__ import annotations

import csv
import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules import tweets
from fl_lightning.datamodules.partitions.deal import ranges
from fl_lightning.errors import FederationError

TRAIN_FILE = "training.1600000.processed.noemoticon.csv"
TEST_FILE = "testdata.manual.2009.06.14.csv"
#: Classes by the first column; neutral tweets (test file only) have none.
LABELS = {"0": 0, "4": 1, "2": -1}
_BLOCK = 20_000


@dataclass(frozen=True)
class Corpus:
    """Tokenized tweets, the training file first.

    Args:
        tokens: all tweets' tokens as indices into ``lexicon``, shape (total,).
        offsets: tweet i is ``tokens[offsets[i]:offsets[i + 1]]``, shape (n + 1,).
        labels: 0 negative, 1 positive, shape (n,).
        users: author of each tweet as an index into ``names``, shape (n,).
        lexicon: all distinct tokens.
        names: all users' names.
        train_size: number of tweets from the training file.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    users: NDArray[np.int64]
    lexicon: list[str]
    names: list[str]
    train_size: int

    def padded(self, length: int) -> NDArray[np.int32]:
        """Return the first ``length`` tokens of every tweet, numbered from 1 and padded with 0, shape (n, length)."""
        sizes = np.minimum(np.diff(self.offsets), length)
        table = np.zeros((len(sizes), length), dtype=np.int32)
        table[np.arange(length) < sizes[:, None]] = self.tokens[ranges(self.offsets[:-1], sizes)] + 1
        return table


def load_corpus(folder: Path, skip_malformed: bool = False) -> Corpus:
    """Load the tokenized files of a folder, from the cache if possible.

    The cache is keyed by the files' contents and the version of the tokenizer. A damaged cache is rebuilt.

    Args:
        folder: folder of the official CSV files; the test file may be missing.
        skip_malformed: drop malformed rows instead of refusing the file.
    """
    files = [folder / name for name in (TRAIN_FILE, TEST_FILE)]
    if not files[0].is_file():
        raise FederationError(
            f"There is no {TRAIN_FILE} in {folder}: put it there, with {TEST_FILE} next to it (both are in the site's "
            "trainingandtestdata.zip), or set root (or FL_LIGHTNING_DATA) to the folder above."
        )
    files = [file for file in files if file.is_file()]
    cache = folder / "cache" / f"tokens-{_key(files, skip_malformed)}.npz"
    corpus = _restore(cache)
    if corpus is None:
        corpus = _build(files, skip_malformed)
        _store(corpus, cache)
    return corpus


def read_rows(path: Path, skip_malformed: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield label, user and text of every row with a class.

    The files are Latin-1 with six columns: label (0, 2 or 4), tweet, date, query, user, text; one row per line.
    """
    with path.open(encoding="latin-1", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            row = _columns(line.rstrip("\r\n").replace("\0", " "))
            if len(row) == 6 and row[0] in LABELS:
                if LABELS[row[0]] >= 0:
                    yield LABELS[row[0]], row[4], row[5]
            elif row and not skip_malformed:
                wrong = (
                    f"{len(row)} columns rather than 6" if len(row) != 6 else f"label {row[0][:20]!r}, not 0, 2 or 4"
                )
                raise FederationError(
                    f"Row {number} of {path} has {wrong}: correct it, or drop such rows with skip_malformed=True."
                )


def _columns(line: str) -> list[str]:
    """Split a line of CSV; a malformed line is returned as one column."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return [line]


class _Numbers(dict[str, int]):
    """Numbers strings in order of first occurrence."""

    def __missing__(self, key: str) -> int:
        number = self[key] = len(self)
        return number


def _build(files: list[Path], skip_malformed: bool) -> Corpus:
    """Read and tokenize the files in blocks of tweets."""
    words, names = _Numbers({"\n": 0}), _Numbers()
    tokens, labels, users, sizes = [], [], [], []
    for path in files:
        rows, size = read_rows(path, skip_malformed), 0
        while block := list(islice(rows, _BLOCK)):
            block_labels, block_users, texts = zip(*block, strict=True)
            found = tweets.tokenize_block(texts)
            tokens.append(np.fromiter(map(words.__getitem__, found), np.int32, len(found)))
            labels.append(np.array(block_labels, dtype=np.int64))
            users.append(np.fromiter(map(names.__getitem__, block_users), np.int64, len(texts)))
            size += len(block)
        if not size:
            raise FederationError(f"{path} has no usable row: get the official file again.")
        sizes.append(size)
    flat = np.concatenate(tokens)
    ends = np.flatnonzero(flat == 0)  # line feeds; they are dropped, so the i-th end moves by i
    offsets = np.concatenate(([0], ends - np.arange(len(ends))))
    return Corpus(
        flat[flat != 0] - 1,
        offsets,
        np.concatenate(labels),
        np.concatenate(users),
        list(words)[1:],
        list(names),
        sizes[0],
    )


def _key(files: list[Path], skip_malformed: bool) -> str:
    """Hash the files' contents and the version of the tokenizer."""
    digest = hashlib.blake2b(f"{tweets.VERSION} {skip_malformed}".encode(), digest_size=12)
    for path in files:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def _store(corpus: Corpus, cache: Path) -> None:
    """Write the cache atomically; warn and go on if that fails."""
    arrays: dict[str, Any] = {f.name: getattr(corpus, f.name) for f in fields(corpus)}
    for name in ("lexicon", "names"):
        arrays[name] = np.frombuffer("\n".join(arrays[name]).encode(), dtype=np.uint8)
    try:
        cache.parent.mkdir(exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(cache)
    except OSError as error:
        warnings.warn(f"The tokens of Sentiment140 could not be cached in {cache.parent}: {error}.", stacklevel=2)


def _restore(cache: Path) -> Corpus | None:
    """Read the cache; None if it is missing or damaged."""
    if not cache.is_file():
        return None
    try:
        with np.load(cache, allow_pickle=False) as stored:
            arrays: dict[str, Any] = {f.name: stored[f.name] for f in fields(Corpus)}
        for name in ("lexicon", "names"):
            arrays[name] = arrays[name].tobytes().decode().split("\n")
        corpus = Corpus(**{**arrays, "train_size": int(arrays["train_size"])})
        tweets_, sound = len(corpus.labels), int(corpus.offsets[-1]) == len(corpus.tokens)
        if not sound or {len(corpus.users), len(corpus.offsets) - 1} != {tweets_}:
            raise ValueError("its parts do not fit together")
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, NotImplementedError) as error:
        warnings.warn(f"The cache {cache} is damaged ({error}) and will be rebuilt.", stacklevel=2)
        return None
    return corpus
