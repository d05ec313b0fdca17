"""The compiled kernels give PyTorch's results, and are optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.layout import native, products

GROUPS = 2
needed = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler to make the kernels with")


@pytest.fixture
def anew() -> object:
    """The library is looked for again, before the test and after it."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needed
@pytest.mark.parametrize("batch", [1, 3, 8, 21, 32])
@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5, 6, 7, 11, 16])
def test_every_size_of_block(batch: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that fill vectors and runs that do not, for all numbers of channels that blocks are made of."""
    _agrees(batch, 3, outputs, (3, 2), {"padding": (1, 0)}, monkeypatch)


@needed
@pytest.mark.parametrize(("batch", "channels"), [(3, 2), (18, 1), (18, 6), (18, 13)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2},
        {"padding": (4, 3)},  # places whose kernel sees nothing but zeros
        {"stride": 2},
        {"stride": (1, 3), "padding": 1},
        {"stride": (3, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"dilation": 2, "padding": 1},
    ],
    ids=str,
)
def test_every_geometry(batch: int, channels: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    _agrees(batch, channels, 6, (3, 3), options, monkeypatch)


def _agrees(
    batch: int, channels: int, outputs: int, kernel: tuple[int, int], options: dict[str, int], patch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients are those of PyTorch's convolution."""
    patch.setattr(products, "SMALL_BATCH", 1)
    x, weight, bias = (
        value.requires_grad_()
        for value in (
            drawn(batch, GROUPS * channels, 7, 8),
            drawn(GROUPS * outputs, channels, *kernel),
            drawn(GROUPS * outputs),
        )
    )
    expected = F.conv2d(x, weight, bias, groups=GROUPS, **options)
    grad = drawn(*expected.shape)
    by_x, by_weight = torch.autograd.grad(expected, (x, weight), grad)
    pairs = [
        [value, value] if isinstance(value, int) else list(value)
        for value in (options.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)))
    ]
    close = {"rtol": 1e-12, "atol": 1e-12}
    with torch.no_grad():
        torch.testing.assert_close(products.convolution(x, weight, bias, *pairs, GROUPS), expected, **close)
        without = products.convolution(x, weight, None, *pairs, GROUPS)
        torch.testing.assert_close(without, expected - bias.view(1, -1, 1, 1), **close)
        torch.testing.assert_close(products.by_input(grad, x, weight, *pairs, GROUPS), by_x, **close)
        torch.testing.assert_close(products.by_weight(grad, x, weight, *pairs, GROUPS), by_weight, **close)


@needed
def test_single_precision() -> None:
    args = ([1, 1], [2, 2], [1, 1], GROUPS)
    x, weight = drawn(32, 2, 12, 12), drawn(12, 1, 5, 5)
    grad = drawn(32, 12, 12, 12)
    for kernel, tensors in (
        (products.convolution, (x, weight, None)),
        (products.by_input, (grad, x, weight)),
        (products.by_weight, (grad, x, weight)),
    ):
        single = kernel(*(None if value is None else value.float() for value in tensors), *args)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), kernel(*tensors, *args), rtol=1e-4, atol=1e-4)


@needed
def test_the_number_of_threads_changes_nothing() -> None:
    args = ([1, 1], [1, 1], [1, 1], GROUPS)
    x, weight, grad = drawn(19, 4, 9, 9).float(), drawn(10, 2, 3, 3).float(), drawn(19, 10, 9, 9).float()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(
                [
                    products.convolution(x, weight, None, *args),
                    products.by_input(grad, x, weight, *args),
                    products.by_weight(grad, x, weight, *args),
                    torch.ops.fl_lightning.tanh(x),
                ]
            )
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@needed
def test_nan_propagates() -> None:
    """A diverged client is found by its weights, which kernels must not make look sound."""
    x, weight = drawn(16, 2, 6, 6), drawn(6, 1, 3, 3)
    x[3, 0, 2, 2] = torch.nan
    args = ([1, 1], [0, 0], [1, 1], GROUPS)
    result = products.convolution(x, weight, None, *args)
    assert result[3, :3].isnan().any()
    assert not result[3, 3:].isnan().any()
    gradient = products.by_weight(torch.ones_like(result), x, weight, *args)
    assert gradient[:3].isnan().all()
    assert not gradient[3:].isnan().any()


@needed
def test_kernels_reject_other_tensors() -> None:
    assert native.kernels(torch.empty(1)) is native.kernels(torch.empty(1, dtype=torch.float64)) is not None
    assert native.kernels(torch.empty(1, dtype=torch.bfloat16)) is None
    assert native.kernels(torch.empty(1, device="meta")) is None


@pytest.mark.usefixtures("anew")
def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_LIGHTNING_NATIVE", "0")
    assert native.library() is None


@pytest.mark.usefixtures("anew")
def test_no_kernels_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.library() is None


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.library() is None


@needed
@pytest.mark.slow
@pytest.mark.usefixtures("anew")
def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ((),))  # as a compiler that knows neither this processor nor OpenMP makes them
    assert native.library() is not None
    (made,) = (tmp_path / "fl_lightning").iterdir()
    before = made.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert list((tmp_path / "fl_lightning").iterdir()) == [made]
    assert made.stat().st_mtime_ns == before
    found = products.convolution(drawn(16, 2, 5, 5), drawn(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], GROUPS)
    expected = F.conv2d(drawn(16, 2, 5, 5), drawn(4, 1, 3, 3), groups=GROUPS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@needed
@pytest.mark.slow
@pytest.mark.usefixtures("anew")
def test_a_damaged_library_is_recompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave the file as a full disk does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ((),))
    assert native.library() is not None
    (made,) = (tmp_path / "fl_lightning").iterdir()
    made.unlink()  # the one that is loaded stays as it is
    made.write_bytes(b"")
    code = "from fl_lightning.layout import native; native.FLAGS = ((),); assert native.library() is not None"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert made.stat().st_size > 0
