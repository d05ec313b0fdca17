"""Convolutions of ten stacked clients by the three ways there are, beside each other: python benchmarks/kernels.py.

Writes kernels.json: for every layer the seconds of the forward pass and of both gradients by matrix products and by
PyTorch's convolutions in groups, as multiples of the compiled kernels'. The three take turns; the best time counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.engine.memory import keep_memory
from fl_lightning.layout import native, products

CLIENTS, REPEATS = 10, 30
#: Channels, outputs, height and width, padding, kernel and batch.
LAYERS = {
    "LeNet-5, first, B = 32": (1, 6, 28, 2, 5, 32),
    "LeNet-5, second, B = 32": (6, 16, 14, 0, 5, 32),
    "LeNet-5, first, B = 10": (1, 6, 28, 2, 5, 10),
    "LeNet-5, second, B = 10": (6, 16, 14, 0, 5, 10),
    "16 to 32 channels, 3 x 3, B = 32": (16, 32, 14, 1, 3, 32),
    "64 to 64 channels, 3 x 3, B = 32": (64, 64, 8, 1, 3, 32),
}


def by_products(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, options: Any) -> None:
    products.convolution(x, weight, bias, *options)
    products.by_input(grad, x, weight, *options)
    products.by_weight(grad, x, weight, *options)


def by_groups(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, options: Any) -> None:
    *others, groups = options
    torch.ops.aten.convolution(x, weight, bias, *others, False, [0, 0], groups)
    torch.ops.aten.convolution_backward(
        grad, x, weight, [len(bias)], *others, False, [0, 0], groups, [True, True, True]
    )


def without_kernels(work: Callable[[], None]) -> None:
    library, native.library = native.library, lambda: None  # type: ignore[assignment]
    try:
        work()
    finally:
        native.library = library


def seconds(*ways: Callable[[], None]) -> list[float]:
    best = [float("inf")] * len(ways)
    for _ in range(REPEATS):
        for i, way in enumerate(ways):
            began = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def measure(channels: int, outputs: int, size: int, padding: int, kernel: int, batch: int) -> dict[str, float]:
    x = torch.randn(CLIENTS * channels, size, size, batch).permute(3, 0, 1, 2)
    weight, bias = torch.randn(CLIENTS * outputs, channels, kernel, kernel), torch.randn(CLIENTS * outputs)
    options = ([1, 1], [padding, padding], [1, 1], CLIENTS)
    grad = torch.randn_like(products.convolution(x, weight, bias, *options))
    last = [value.contiguous(memory_format=torch.channels_last) for value in (x, grad)]
    ours, matrices, groups = seconds(
        lambda: by_products(x, weight, bias, grad, options),
        lambda: without_kernels(lambda: by_products(x, weight, bias, grad, options)),
        lambda: by_groups(last[0], weight, bias, last[1], options),
    )
    work = 6 * CLIENTS * outputs * channels * kernel**2 * batch * grad.shape[2] * grad.shape[3]
    return {
        "products": round(matrices / ours, 2),
        "groups": round(groups / ours, 2),
        "gigaflops": round(work / ours / 1e9, 1),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    if native.library() is None:
        raise SystemExit("There are no kernels: they need a C++ compiler.")
    found = {name: measure(*layer) for name, layer in LAYERS.items()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
