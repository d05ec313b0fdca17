"""A net for tables of categorical codes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count


class EmbeddingBagNet(FedNet):
    """Mean embedding of a row's codes, a perceptron, ``head``. Code 0 means no value.

    Args:
        num_embeddings: rows of the embedding: codes of all columns, and 0.
        num_outputs: outputs of the last layer, ``head``.
        embedding: size of an embedding.
        hidden: widths of the hidden layers.

    Example:
        >>> EmbeddingBagNet(20, 1)(torch.tensor([[3, 11, 0], [4, 12, 17]])).shape
        torch.Size([2, 1])
    """

    def __init__(
        self, num_embeddings: Count, num_outputs: Count = 2, embedding: Count = 16, hidden: Sequence[Count] = (32,)
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding, padding_idx=0)
        widths = [embedding, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs of shape (B, num_outputs) for codes of shape (B, columns)."""
        present = (x != 0).sum(1, keepdim=True).clamp(min=1)
        found = self.embedding(x).sum(1) / present  # not nn.EmbeddingBag, which cannot be stacked over clients
        for layer in self.layers:
            found = F.relu(layer(found))
        outputs: Tensor = self.head(found)
        return outputs


def as_codes(columns: Sequence[Sequence[object]]) -> tuple[Tensor, list[dict[object, int]]]:
    """Encode columns of words with codes from 1 that differ between columns.

    Args:
        columns: the columns.

    Returns:
        The codes, shape (rows, columns), and for every column the codes by word.

    Example:
        >>> as_codes([["a", "b", "a"], ["x", "x", "y"]])[0].tolist()
        [[1, 3], [2, 3], [1, 4]]
    """
    known, start = list[dict[object, int]](), 1
    for column in columns:
        words = sorted(set(column), key=str)
        known.append({word: start + place for place, word in enumerate(words)})
        start += len(words)
    rows = [[codes[word] for word in column] for column, codes in zip(columns, known, strict=True)]
    return torch.tensor(rows).T.contiguous(), known
