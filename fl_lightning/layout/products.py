"""Grouped convolutions as matrix products on CHWN images, by im2col along the width only.

Each row of a kernel needs the same columns of pixels, shifted by a line of the image. The columns are therefore copied
once for all rows, which then read them from different offsets: a 5 x 5 kernel copies the image five times instead of
twenty-five, and makes five products.

The three functions are custom operators (``torch.ops.fl_lightning``), so that a captured step contains one functional
operation instead of dozens that mutate memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.layout.memory import from_chwn, to_chwn
from fl_lightning.layout.native import kernels

#: Maximum size in bytes of the columns computed at a time, so that they fit in cache.
CACHE_BYTES = 2**22
#: With smaller batches the kernels' vectors are half empty at image borders, which dominates the gradient's time.
SMALL_BATCH = 16


class Geometry:
    """Sizes of a grouped convolution, and which pixels its kernel covers.

    Args:
        size: shape of the images, (batch, groups * channels, height, width).
        kernel: shape of the weight, (groups * outputs, channels, kernel height, kernel width).
        stride: stride along height and width.
        padding: zero padding along height and width.
        dilation: dilation along height and width.
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
        #: Lines of the padded image that the kernel covers, grouped by their remainder modulo the stride.
        self.lines = self.out[0] + reach[0] // stride[0]
        #: Number of values in a line of the output, and in the whole output.
        self.line = self.out[1] * self.batch
        self.places = self.out[0] * self.line

    def for_kernels(self) -> list[int]:
        """Return the sizes as :class:`~fl_lightning.layout.native.Kernels` expects them."""
        images = [self.groups, self.channels, *self.image, self.batch, self.outputs, *self.kernel]
        return [*images, *self.stride, *self.padding, *self.dilation, *self.out]

    @property
    def is_copy(self) -> bool:
        """Whether the columns are the image itself, so that im2col is not needed."""
        return self.kernel[1] == 1 and self.stride == [1, 1] and self.padding == [0, 0]

    def rows(self, weight: Tensor) -> Tensor:
        """Return the kernel's rows as matrices, (kernel height, groups, outputs, channels * kernel width)."""
        apart = weight.unflatten(0, (self.groups, -1))  # type: ignore[no-untyped-call]
        return apart.permute(3, 0, 1, 2, 4).flatten(3)  # type: ignore[no-any-return]

    def window(self, columns: Tensor, row: int) -> Tensor:
        """Return the columns for one row of the kernel, (groups, channels * kernel width, output pixels * batch)."""
        remainder, start = row * self.dilation[0] % self.stride[0], row * self.dilation[0] // self.stride[0]
        return columns[:, :, remainder].flatten(2)[:, :, start * self.line : start * self.line + self.places]

    def chunks(self, itemsize: int) -> Iterator[slice]:
        """Yield slices of groups whose columns fit in cache."""
        size = itemsize * self.channels * self.kernel[1] * self.stride[0] * self.lines * self.line
        step = max(1, CACHE_BYTES // size)
        return (slice(start, min(start + step, self.groups)) for start in range(0, self.groups, step))

    def columns(self, images: Tensor) -> Tensor:
        """Copy images (groups, channels, height, width, batch) to columns (im2col along the width).

        Returns them as (groups, channels * kernel width, remainder modulo the stride, lines, line), for the lines of
        the padded image.
        """
        if self.is_copy:
            return images.flatten(3).unsqueeze(2)
        shape = (len(images), self.channels, self.kernel[1], self.stride[0], self.lines, self.out[1], self.batch)
        columns = images.new_zeros(shape) if any(self.padding) else images.new_empty(shape)
        for target, source in self._meetings(columns, images):
            target.copy_(source)
        return columns.flatten(5).flatten(1, 2)

    def fold(self, columns: Tensor) -> Tensor:
        """Add columns to the pixels that they were copied from (col2im): the transpose of :meth:`columns`."""
        if self.is_copy:
            return columns.view(len(columns), self.channels, *self.image, self.batch)
        apart = columns.unflatten(1, (self.channels, -1)).unflatten(5, (self.out[1], self.batch))  # type: ignore[no-untyped-call]
        images = columns.new_zeros(len(columns), self.channels, *self.image, self.batch)
        for source, target in self._meetings(apart, images):
            target.add_(source)
        return images

    def _meetings(self, columns: Tensor, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the columns with the parts of the images that they are copies of."""
        (height, width), (down, right) = self.image, self.stride
        for point in range(self.kernel[1]):
            shift = point * self.dilation[1] - self.padding[1]
            here = _meeting(self.out[1], right, shift, width)
            for remainder in range(down):
                lines = _meeting(self.lines, down, remainder - self.padding[0], height)
                if here is not None and lines is not None:
                    yield columns[:, :, point, remainder, lines[0], here[0]], images[:, :, lines[1], here[1]]


def _meeting(count: int, stride: int, shift: int, size: int) -> tuple[slice, slice] | None:
    """Return the range of indices below ``count`` with ``index * stride + shift`` inside an image, and its image."""
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
    """Compute the grouped convolution of (batch, groups * channels, height, width) with (groups * outputs, ...)."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    result = x.new_empty(groups, sizes.outputs, sizes.places)
    if (native := kernels(x)) is not None:
        given = None if bias is None else bias.contiguous()
        native.convolution(to_chwn(x), weight.contiguous(), given, result, sizes.for_kernels())
        return from_chwn(result.view(-1, *sizes.out, sizes.batch))
    images, rows = to_chwn(x).unflatten(0, (groups, -1)), sizes.rows(weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        result.copy_(bias.view(groups, -1, 1).expand_as(result))
    for part in sizes.chunks(x.element_size()):
        columns, target = sizes.columns(images[part]), result[part]
        for i, row in enumerate(rows):
            target.baddbmm_(row[part], sizes.window(columns, i), beta=0 if i == 0 and bias is None else 1)
    return from_chwn(result.view(-1, *sizes.out, sizes.batch))


@convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    sizes = Geometry(x.shape, weight.shape, *options)
    return from_chwn(x.new_empty(weight.shape[0], *sizes.out, sizes.batch))


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
    """Compute the gradient of :func:`convolution` with respect to its input; only the shape of ``x`` matters."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    result = grad.new_empty(groups, sizes.channels, *sizes.image, sizes.batch)
    if sizes.batch >= SMALL_BATCH and (native := kernels(grad)) is not None:
        native.by_input(to_chwn(grad), weight.contiguous(), result, sizes.for_kernels())
        return from_chwn(result.flatten(0, 1))
    grads, rows = to_chwn(grad).view(groups, sizes.outputs, -1), sizes.rows(weight)
    for part in sizes.chunks(grad.element_size()):
        own = grads[part]
        columns = grad.new_zeros(len(own), rows.shape[3], stride[0], sizes.lines, sizes.line)
        for i, row in enumerate(rows):
            sizes.window(columns, i).baddbmm_(row[part].mT, own)
        result[part] = sizes.fold(columns)
    return from_chwn(result.flatten(0, 1))


@by_input.register_fake
def _(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    batch, *image = x.shape
    return from_chwn(grad.new_empty(*image, batch))


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
    """Compute the gradient of :func:`convolution` with respect to its weight; only the shape of ``weight`` matters."""
    sizes = Geometry(x.shape, weight.shape, stride, padding, dilation, groups)
    if (native := kernels(grad)) is not None:
        result = grad.new_empty(weight.shape)
        native.by_weight(to_chwn(grad), to_chwn(x), result, sizes.for_kernels())
        return result
    images, grads = to_chwn(x).unflatten(0, (groups, -1)), to_chwn(grad).view(groups, sizes.outputs, -1)  # type: ignore[no-untyped-call]
    length = sizes.channels * sizes.kernel[1]
    upright = sizes.outputs >= length  # products with more rows than columns are faster
    shape = (sizes.outputs, length) if upright else (length, sizes.outputs)
    products = grad.new_empty(sizes.kernel[0], groups, *shape)
    for part in sizes.chunks(grad.element_size()):
        columns, own = sizes.columns(images[part]), grads[part]
        for i, product in enumerate(products):
            window = sizes.window(columns, i)
            torch.bmm(*((own, window.mT) if upright else (window, own.mT)), out=product[part])
    rows = products if upright else products.mT
    apart = rows.unflatten(3, (sizes.channels, -1)).permute(1, 2, 3, 0, 4)  # type: ignore[no-untyped-call]
    return apart.reshape(weight.shape).contiguous()  # type: ignore[no-any-return]  # a view, if of one channel


@by_weight.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(weight.shape)
