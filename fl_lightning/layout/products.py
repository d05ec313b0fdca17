"""Convolutions in groups as matrix products, on images with the batch innermost.

A row of a kernel meets the image at every column: the pixels that it meets, its *columns*, are copied once. From one
row of the kernel to the next the same columns are only read from another line of the image on, which is a matter of
where a matrix begins: a kernel of 5 x 5 copies five images' worth of pixels, not twenty-five, and makes five products.

The three functions are operators of their own (``torch.ops.fl_lightning``), so that a captured step sees one operation
that writes to nothing instead of dozens that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.layout.memory import inward, outward
from fl_lightning.layout.native import kernels

#: Columns of so many clients are made at a time as fit a cache.
CACHE_BYTES = 2**22
#: Kernels leave vectors at the edges of images half empty where batches are smaller; that is most of a gradient's work.
SMALL_BATCH = 16


class Geometry:
    """Sizes of a convolution in groups, and where its kernel meets the images.

    Args:
        size: shape of the images, (batch, groups * channels, height, width).
        kernel: shape of the weight, (groups * outputs, channels, kernel height, kernel width).
        stride: of the kernel, along height and width.
        padding: zeros around the images.
        dilation: distance of the kernel's points.
        groups: number of groups.
    """

    def __init__(
        self,
        size: torch.Size,
        kernel: torch.Size,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> None:
        self.batch, _, *self.image = size
        self.outputs, self.channels, *self.kernel = kernel[0] // groups, *kernel[1:]
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        reach = [d * (k - 1) for d, k in zip(dilation, self.kernel, strict=True)]
        height, width = ((n + 2 * p - r) for n, p, r in zip(self.image, padding, reach, strict=True))
        self.out = (1 + (height - 1) // stride[0], 1 + (width - 1) // stride[1])
        #: Lines of the padded image that the kernel meets, those with the same remainder by the stride together.
        self.lines = self.out[0] + reach[0] // stride[0]
        #: Values of a line of the output, and of the whole.
        self.line = self.out[1] * self.batch
        self.places = self.out[0] * self.line

    def for_kernels(self) -> list[int]:
        """The sizes as :class:`~fl_lightning.layout.native.Kernels` takes them."""
        images = [self.groups, self.channels, *self.image, self.batch, self.outputs, *self.kernel]
        return [*images, *self.stride, *self.padding, *self.dilation, *self.out]

    @property
    def is_copy(self) -> bool:
        """Whether the columns are the image itself."""
        return self.kernel[1] == 1 and self.stride == [1, 1] and self.padding == [0, 0]

    def rows(self, weight: Tensor) -> Tensor:
        """The kernel's rows as matrices, (kernel height, groups, outputs, channels * kernel width)."""
        apart = weight.unflatten(0, (self.groups, -1))  # type: ignore[no-untyped-call]
        return apart.permute(3, 0, 1, 2, 4).flatten(3)  # type: ignore[no-any-return]

    def window(self, columns: Tensor, row: int) -> Tensor:
        """The columns that a row of the kernel meets, (groups, channels * kernel width, places)."""
        remainder, start = row * self.dilation[0] % self.stride[0], row * self.dilation[0] // self.stride[0]
        return columns[:, :, remainder].flatten(2)[:, :, start * self.line : start * self.line + self.places]

    def chunks(self, itemsize: int) -> Iterator[slice]:
        """Groups whose columns fit a cache."""
        size = itemsize * self.channels * self.kernel[1] * self.stride[0] * self.lines * self.line
        step = max(1, CACHE_BYTES // size)
        return (slice(start, min(start + step, self.groups)) for start in range(0, self.groups, step))

    def columns(self, images: Tensor) -> Tensor:
        """Columns of images (groups, channels, height, width, batch).

        Returns them as (groups, channels * kernel width, remainder by the stride, lines, line), lines and remainders
        being those of the padded image.
        """
        if self.is_copy:
            return images.flatten(3).unsqueeze(2)
        shape = (len(images), self.channels, self.kernel[1], self.stride[0], self.lines, self.out[1], self.batch)
        columns = images.new_zeros(shape) if any(self.padding) else images.new_empty(shape)
        for target, source in self._meetings(columns, images):
            target.copy_(source)
        return columns.flatten(5).flatten(1, 2)

    def fold(self, columns: Tensor) -> Tensor:
        """Add what is in the columns to the places of images that it came from: the transpose of :meth:`columns`."""
        if self.is_copy:
            return columns.view(len(columns), self.channels, *self.image, self.batch)
        apart = columns.unflatten(1, (self.channels, -1)).unflatten(5, (self.out[1], self.batch))  # type: ignore[no-untyped-call]
        images = columns.new_zeros(len(columns), self.channels, *self.image, self.batch)
        for source, target in self._meetings(apart, images):
            target.add_(source)
        return images

    def _meetings(self, columns: Tensor, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the columns, and the parts of the images that they are copies of."""
        (height, width), (down, right) = self.image, self.stride
        for point in range(self.kernel[1]):
            shift = point * self.dilation[1] - self.padding[1]
            here = _meeting(self.out[1], right, shift, width)
            for remainder in range(down):
                lines = _meeting(self.lines, down, remainder - self.padding[0], height)
                if here is not None and lines is not None:
                    yield columns[:, :, point, remainder, lines[0], here[0]], images[:, :, lines[1], here[1]]


def _meeting(count: int, stride: int, shift: int, size: int) -> tuple[slice, slice] | None:
    """Of ``count`` places, those whose ``place * stride + shift`` lies in an image, and where it lies; None if none."""
    first = max(0, -(shift // stride))
    stop = min(count, (size - 1 - shift) // stride + 1)
    if first >= stop:
        return None
    start = first * stride + shift
    return slice(first, stop), slice(start, start + (stop - first - 1) * stride + 1, stride)


@torch.library.custom_op("fl_lightning::convolution", mutates_args=())
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Convolve images (batch, groups * channels, height, width) with (groups * outputs, channels, ...) in groups."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    result = x.new_empty(groups, sizes.outputs, sizes.places)
    if (native := kernels(x)) is not None:
        given = None if bias is None else bias.contiguous()
        native.convolution(inward(x), weight.contiguous(), given, result, sizes.for_kernels())
        return outward(result.view(-1, *sizes.out, sizes.batch))
    images, rows = inward(x).unflatten(0, (groups, -1)), sizes.rows(weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        result.copy_(bias.view(groups, -1, 1).expand_as(result))
    for part in sizes.chunks(x.element_size()):
        columns, target = sizes.columns(images[part]), result[part]
        for i, row in enumerate(rows):
            target.baddbmm_(row[part], sizes.window(columns, i), beta=0 if i == 0 and bias is None else 1)
    return outward(result.view(-1, *sizes.out, sizes.batch))


@convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    sizes = Geometry(x.shape, weight.shape, *options)
    return outward(x.new_empty(weight.shape[0], *sizes.out, sizes.batch))


@torch.library.custom_op("fl_lightning::convolution_by_input", mutates_args=())
def by_input(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The gradient of :func:`convolution` by its input, of which only the shape matters."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    result = grad.new_empty(groups, sizes.channels, *sizes.image, sizes.batch)
    if sizes.batch >= SMALL_BATCH and (native := kernels(grad)) is not None:
        native.by_input(inward(grad), weight.contiguous(), result, sizes.for_kernels())
        return outward(result.flatten(0, 1))
    grads, rows = inward(grad).view(groups, sizes.outputs, -1), sizes.rows(weight)
    for part in sizes.chunks(grad.element_size()):
        own = grads[part]
        columns = grad.new_zeros(len(own), rows.shape[3], stride[0], sizes.lines, sizes.line)
        for i, row in enumerate(rows):
            sizes.window(columns, i).baddbmm_(row[part].mT, own)
        result[part] = sizes.fold(columns)
    return outward(result.flatten(0, 1))


@by_input.register_fake
def _(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    batch, *image = x.shape
    return outward(grad.new_empty(*image, batch))


@torch.library.custom_op("fl_lightning::convolution_by_weight", mutates_args=())
def by_weight(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The gradient of :func:`convolution` by its weight, of which only the shape matters."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    if (native := kernels(grad)) is not None:
        result = grad.new_empty(weight.shape)
        native.by_weight(inward(grad), inward(x), result, sizes.for_kernels())
        return result
    images, grads = inward(x).unflatten(0, (groups, -1)), inward(grad).view(groups, sizes.outputs, -1)  # type: ignore[no-untyped-call]
    length = sizes.channels * sizes.kernel[1]
    upright = sizes.outputs >= length  # the product with more rows than columns is the faster one
    shape = (sizes.outputs, length) if upright else (length, sizes.outputs)
    products = grad.new_empty(sizes.kernel[0], groups, *shape)
    for part in sizes.chunks(grad.element_size()):
        columns, own = sizes.columns(images[part]), grads[part]
        for i, product in enumerate(products):
            window = sizes.window(columns, i)
            torch.bmm(*((own, window.mT) if upright else (window, own.mT)), out=product[part])
    rows = products if upright else products.mT
    apart = rows.unflatten(3, (sizes.channels, -1)).permute(1, 2, 3, 0, 4)  # type: ignore[no-untyped-call]
    return apart.reshape(weight.shape).contiguous()  # type: ignore[no-any-return]  # of one channel, it is still a view


@by_weight.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(weight.shape)
