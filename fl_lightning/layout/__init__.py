"""Convolutions, pooling, BatchNorm and GroupNorm of a stack's clients in one call, on memory that suits them.

``torch.vmap`` maps a convolution over clients by making groups of their channels, and max pooling by making samples of
them. Both then work on small maps that lie apart, with copies in between. Within :class:`BatchLast` the batch lies
innermost from the first convolution to the last, and convolutions are matrix products
(:mod:`fl_lightning.layout.products`).
"""

from fl_lightning.layout.mode import BETTER, BatchLast

__all__ = ["BETTER", "BatchLast"]
