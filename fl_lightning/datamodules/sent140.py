"""Sentiment140: positive and negative tweets, with their users."""

from __future__ import annotations

import hashlib
import shutil
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules.base import FederatedDataModule, Samples
from fl_lightning.datamodules.corpus import Corpus, load_corpus
from fl_lightning.datamodules.images import data_root
from fl_lightning.datamodules.partitions.base import Partition
from fl_lightning.datamodules.tweets import mask
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex
from fl_lightning.ranges import Count, CountOrZero

PAD, UNKNOWN = 0, 1


class Sent140(FederatedDataModule):
    """Tweets as token numbers, int64, shape (n, length), padded with 0; label 1 is positive.

    The vocabulary holds the most frequent tokens of the clients' training tweets only. Token 0 is padding and 1 is any
    token that is not in the vocabulary, so the mask is ``tokens != 0`` (:meth:`mask`) and a net needs an embedding of
    ``num_embeddings`` rows. Reads the official CSV files from ``root/sentiment140``; tokens are cached in the same
    folder. Published work uses the partitions ``ByUser`` and ``DominantClass``.

    Args:
        root: data folder. Default: the environment variable FL_LIGHTNING_DATA, else ``data``.
        vocab_size: number of tokens in the vocabulary, besides padding and unknown.
        min_freq: minimum frequency of a token in the vocabulary.
        length: number of tokens kept of each tweet.
        vectors: file of pretrained word vectors (GloVe's text format) for :attr:`embeddings`.
        skip_malformed: drop malformed rows instead of refusing the file.
        **kwargs: as for every DataModule.
    """

    num_classes = 2

    def __init__(
        self,
        root: str | None = None,
        vocab_size: Count = 20_000,
        min_freq: CountOrZero = 1,
        length: Count = 40,
        vectors: str | None = None,
        skip_malformed: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if find_spec("torchtext") is None:
            raise FederationError("Sent140 needs torchtext: install the text extra, pip install 'fl-lightning[text]'.")
        if vectors is not None and not Path(vectors).is_file():
            raise FederationError(
                f"There is no file of word vectors {vectors}: give a local GloVe file or leave it out."
            )
        self.folder = Path(data_root(root)) / "sentiment140"
        self.vocab_size = vocab_size
        self.min_freq = min_freq
        self.length = length
        self.vectors = vectors
        self.skip_malformed = skip_malformed
        self.input_shape = (length,)

    @property
    def num_embeddings(self) -> int:
        """Number of rows of an embedding: the vocabulary, padding and unknown."""
        return self.vocab_size + 2

    @property
    def net_arguments(self) -> dict[str, int]:
        """Arguments that a net may take from this data, including ``num_embeddings``."""
        return {**super().net_arguments, "num_embeddings": self.num_embeddings}

    @cached_property
    def corpus(self) -> Corpus:
        """All tweets with a class, tokenized."""
        return load_corpus(self.folder, self.skip_malformed)

    def load(self) -> Samples:
        """Return all tweets as indices into the corpus's lexicon, independent of the vocabulary."""
        corpus = self.corpus
        size = corpus.train_size if corpus.train_size < len(corpus.labels) else None
        inputs = torch.from_numpy(corpus.padded(self.length))
        return Samples(inputs, torch.from_numpy(corpus.labels), size, torch.from_numpy(corpus.users))

    def encode(self, samples: Samples, train: ClientIndex) -> Tensor:
        """Map the tokens to the vocabulary of the training tweets."""
        used = samples.inputs[train.flat].ravel().numpy()
        counts = np.bincount(used, minlength=len(self.corpus.lexicon) + 1)[1:].tolist()
        pairs = zip(self.corpus.lexicon, counts, strict=True)
        self.vocab = _vocabulary(Counter({word: n for word, n in pairs if n}), self.vocab_size, self.min_freq)
        numbers = self.vocab.stoi
        lookup = torch.tensor([PAD, *(numbers.get(word, UNKNOWN) for word in self.corpus.lexicon)])
        return lookup[samples.inputs.long()]

    @property
    def scale(self) -> str:
        """Another vocabulary."""
        return "" if (self.vocab_size, self.min_freq) == (20_000, 1) else f"{self.vocab_size} {self.min_freq}"

    def client_meta(self, partition: Partition) -> Mapping[str, Sequence[Any]]:
        """Return the clients' users by name instead of number."""
        users = partition.meta.get("user")
        return partition.meta if users is None else {**partition.meta, "user": [self.corpus.names[u] for u in users]}

    @cached_property
    def embeddings(self) -> Tensor | None:
        """Pretrained vectors of the vocabulary, shape (num_embeddings, dim); None unless ``vectors`` names a file.

        Tokens missing from the file, including padding, are zero.
        """
        self.setup()
        if self.vectors is None:
            return None
        source = _vectors(Path(self.vectors), self.folder / "cache")
        table = torch.zeros(self.num_embeddings, source.dim)
        rows = [(i, source.stoi[word]) for i, word in enumerate(self.vocab.itos) if word in source.stoi]
        if rows:
            own, theirs = torch.tensor(rows).T
            table[own] = source.vectors[theirs]
        return table

    mask = staticmethod(mask)


def _vocabulary(counts: Counter[str], size: int, min_freq: int) -> Any:
    """Build the torchtext vocabulary with padding at 0 and unknown at 1."""
    from torchtext.vocab import Vocab

    return Vocab(counts, max_size=size, min_freq=min_freq, specials=["<pad>", "<unk>"])


def _vectors(path: Path, cache: Path) -> Any:
    """Load torchtext vectors from a local file; the cache is keyed by the file's hash and rebuilt if damaged."""
    from torchtext.vocab import Vectors

    with path.open("rb") as stream:
        folder = cache / f"vectors-{hashlib.file_digest(stream, 'blake2b').hexdigest()[:16]}"
    context = ssl._create_default_https_context
    try:
        for attempt in range(2):
            try:
                return Vectors(str(path), cache=str(folder))
            except Exception as error:  # a damaged cache raises many types; a damaged file fails twice
                shutil.rmtree(folder, ignore_errors=True)
                if attempt:
                    reason = " ".join(str(error).split())[:200]
                    raise FederationError(f"{path} is not a file of word vectors ({reason}).") from None
    finally:
        ssl._create_default_https_context = context  # torchtext switches certificate checks off for the whole process
