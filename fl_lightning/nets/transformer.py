"""Small Transformers: bidirectional and causal ones over tokens, and one over patches of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import FederationError
from fl_lightning.nets.base import FedNet
from fl_lightning.ranges import Count, CountOrZero, ShareBelowOne


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        width: features of a token.
        heads: number of heads.
        causal: whether a token attends only to itself and earlier ones.
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise FederationError(f"width={width} must be a multiple of heads={heads}.")
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Mix tokens of shape (B, length, width); ``present``, shape (B, length), is false for padding."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        scores = query @ key.transpose(-2, -1) * key.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if present is not None:  # finite, because a sequence may consist of padding only
            scores = scores.masked_fill(~present[:, None, None, :], -1e9)
        mixed: Tensor = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Pre-norm Transformer block: attention and a perceptron, each with a residual connection.

    Args:
        width: features of a token.
        heads: number of heads.
        dropout: probability that a feature of either branch is dropped in training.
        causal: whether a token attends only to itself and earlier ones.
    """

    def __init__(self, width: int, heads: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Compute tokens of shape (B, length, width)."""
        x = x + self.drop1(self.attention(self.norm1(x), present))
        out: Tensor = x + self.drop2(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return out


class _Tokens(FedNet):
    """Embeddings of tokens and positions, followed by blocks."""

    def __init__(
        self, num_embeddings: int, length: int, width: int, depth: int, heads: int, dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding, self.places = nn.Embedding(num_embeddings, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def features(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Compute features at every position, shape (B, length, width)."""
        if x.shape[1] > self.length:
            raise FederationError(f"Sequences have {x.shape[1]} tokens: set length to that or more, not {self.length}.")
        found = self.embedding(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            found = block(found, present)
        normed: Tensor = self.norm(found)
        return normed


class TransformerEncoder(_Tokens):
    """Sequence classification: bidirectional blocks, the mean over tokens, ``head``. Token 0 is padding.

    Args:
        num_embeddings: rows of the embedding: tokens and padding.
        num_classes: outputs of the last layer, ``head``.
        length: maximum length of a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: heads of a block.
        dropout: probability that a feature is dropped in training.

    Example:
        >>> TransformerEncoder(50, num_classes=3)(torch.tensor([[5, 2, 7, 0], [4, 1, 0, 0]])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        num_embeddings: Count = 20_002,
        num_classes: Count = 2,
        length: Count = 64,
        width: Count = 64,
        depth: CountOrZero = 2,
        heads: Count = 4,
        dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__(num_embeddings, length, width, depth, heads, dropout, causal=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores of shape (B, classes) for tokens of shape (B, length)."""
        present = x != 0
        found = self.features(x, present) * present[..., None]
        scores: Tensor = self.head(found.sum(1) / present.sum(1, keepdim=True).clamp(min=1))
        return scores


class TransformerDecoder(_Tokens):
    """Next-token prediction: causal blocks, ``head``.

    Args:
        num_embeddings: number of tokens.
        length: maximum length of a sequence.
        width: features of a token.
        depth: number of blocks.
        heads: heads of a block.
        dropout: probability that a feature is dropped in training.

    Example:
        >>> TransformerDecoder(30, length=8)(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 30])
    """

    def __init__(
        self,
        num_embeddings: Count = 128,
        length: Count = 64,
        width: Count = 64,
        depth: CountOrZero = 2,
        heads: Count = 4,
        dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__(num_embeddings, length, width, depth, heads, dropout, causal=True)
        self.head = nn.Linear(width, num_embeddings)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores of shape (B, length, tokens) for tokens of shape (B, length)."""
        scores: Tensor = self.head(self.features(x))
        return scores


class ViTTiny(FedNet):
    """A Vision Transformer with a class token, in the "tiny" size for small images.

    Args:
        num_classes: outputs of the last layer, ``head``.
        size: height and width of the images.
        channels: channels of the images.
        patch: height and width of a patch.
        width: features of a patch.
        depth: number of blocks.
        heads: heads of a block.
        dropout: probability that a feature is dropped in training.

    Example:
        >>> ViTTiny(depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: Count = 10,
        size: Count = 32,
        channels: Count = 3,
        patch: Count = 4,
        width: Count = 192,
        depth: CountOrZero = 6,
        heads: Count = 3,
        dropout: ShareBelowOne = 0.0,
    ) -> None:
        super().__init__()
        if size % patch:
            raise FederationError(f"size={size} must be a multiple of patch={patch}.")
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores of shape (B, classes) for images of shape (B, channels, size, size)."""
        found = self.patches(x).flatten(2).transpose(1, 2)
        found = torch.cat((self.token.expand(len(found), -1, -1), found), dim=1) + self.places
        for block in self.blocks:
            found = block(found)
        scores: Tensor = self.head(self.norm(found[:, 0]))
        return scores
