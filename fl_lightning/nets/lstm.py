"""A bidirectional LSTM over tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.nets.base import FedNet
from fl_lightning.nets.units import Units, recurrent_units
from fl_lightning.ranges import Count, ShareBelowOne


class BothWays(nn.LSTM):
    """A bidirectional LSTM layer whose sequences are given in both orders, each with padding last."""

    def forward(self, x: Tensor, turned: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Compute the outputs of both directions, each in its own order and 0 for padding, with ``present``.

        Args:
            x: the sequences, shape (B, length, features).
            turned: the sequences with their tokens reversed.
            present: mask of tokens, false for padding, shape (B, length).
        """
        outputs = torch.cat((self._direction(x, ""), self._direction(turned, "_reverse")), 2)
        return outputs * present[..., None], present

    def _direction(self, x: Tensor, suffix: str) -> Tensor:
        """Compute the outputs of one direction, shape (B, length, units)."""
        kinds = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [getattr(self, kind + suffix) for kind in kinds]
        start = x.new_zeros(1, len(x), self.hidden_size)
        outputs: Tensor = torch.lstm(x, (start, start), weights, True, 1, 0.0, self.training, False, True)[0]
        return outputs


class BiLSTM(FedNet):
    """``bilstm``: embedding, one bidirectional LSTM, mean of its outputs over tokens, LayerNorm, dropout, ``head``.

    Token 0 is padding, comes last and has no effect: the backward direction starts at the last token, as with packed
    sequences, which cannot be stacked over clients. With the sizes of Sent140 there are 2,000,200 parameters in the
    embedding, 84,992 in the LSTM, 256 in the LayerNorm and 258 in the head.

    Args:
        num_embeddings: rows of the embedding: tokens, padding and unknown (``Sent140.num_embeddings``).
        embedding: size of an embedding.
        units: units per direction.
        dropout: probability that a feature is dropped in training.
        num_classes: outputs of the last layer, ``head``.

    Example:
        >>> BiLSTM()(torch.tensor([[5, 2, 7, 0, 0], [4, 1, 0, 0, 0]])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        num_embeddings: Count = 20_002,
        embedding: Count = 100,
        units: Count = 64,
        dropout: ShareBelowOne = 0.3,
        num_classes: Count = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding, padding_idx=0)
        self.lstm = BothWays(embedding, units, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * units)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * units, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits of shape (B, num_classes) for tokens of shape (B, length)."""
        logits: Tensor = self.head(self.dropout(self.norm(self.features(x))))
        return logits

    def units(self) -> list[Units]:
        """Return the units of each direction."""
        return recurrent_units(self, "lstm", readers=["head"], norms=["norm"])

    def features(self, x: Tensor) -> Tensor:
        """Compute the mean output of the LSTM over a sequence's tokens, shape (B, 2 units); 0 without any tokens."""
        present = x != 0
        lengths = present.sum(1, keepdim=True)
        place = torch.arange(x.shape[1], device=x.device).expand_as(x)
        # Reverse the tokens but keep padding last. The outputs stay reversed, which does not change their mean.
        turned = torch.where(place < lengths, lengths - 1 - place, place)
        outputs, _ = self.lstm(self.embedding(x), self.embedding(x.gather(1, turned)), present)
        total: Tensor = outputs.sum(1)
        return total / lengths.clamp(min=1)
