"""Fast layers for stacks of clients: each convolution, pooling or normalisation runs once for all clients.

``torch.vmap`` turns a convolution over K clients into one with K groups, and folds the clients of max pooling into the
batch; both are slow on small images and copy them in between. Within :class:`StackLayout` the images of a stack always
have the shape (N, K*C, H, W), in one of two memory layouts (:mod:`fl_lightning.layout.memory`)::

    one client's images      (N, C, H, W), N samples of C channels
    the stack's images       (N, K*C, H, W), channels of client k at [k*C, (k+1)*C)

    CHWN, "batch last"       client 0                          client 1
      outermost K*C  ->      [ch 0: H x W x (n0 n1 ... nN)]..  [ch 0: H x W x (n0 n1 ... nN)]..
      innermost N            im2col copies contiguous runs of N, and the products are plain GEMMs

    NHWC, "channels last"    sample 0                          sample 1
      outermost N    ->      [pixel 0: (client 0: c0 c1 ..)(client 1: c0 c1 ..)][pixel 1: ..]..
      innermost K*C          PyTorch's own grouped convolutions, fast if C is a multiple of 8

Convolutions choose the faster layout for their numbers of channels: im2col with matrix products on CHWN
(:mod:`fl_lightning.layout.products`), or grouped convolutions on NHWC. Pooling and normalisation keep the layout.
"""

from fl_lightning.layout.convolution import fast_in_stack
from fl_lightning.layout.mode import BETTER, StackLayout

__all__ = ["BETTER", "StackLayout", "fast_in_stack"]
