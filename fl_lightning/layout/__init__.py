"""Convolutions, pooling, BatchNorm and GroupNorm of a stack's clients in one call, on memory that suits them.

``torch.vmap`` maps a convolution over clients by making groups of their channels, and max pooling by making samples of
them. Both then work on small maps that lie apart, with copies in between. Within :class:`StackLayout` images lie with
either the batch or the channels innermost (:mod:`fl_lightning.layout.memory`), and convolutions are matrix products
(:mod:`fl_lightning.layout.products`) or convolutions in groups, whichever is faster for their numbers of channels.
"""

from fl_lightning.layout.convolution import fast_in_stack
from fl_lightning.layout.mode import BETTER, StackLayout

__all__ = ["BETTER", "StackLayout", "fast_in_stack"]
