"""The kernels of ``native.cpp``, compiled on first use; without a compiler they are not used.

They run the convolutions of a stack several times as fast as matrix products if there are few channels. The compiled
library is stored in the user's cache folder. ``FL_LIGHTNING_NATIVE=0`` disables the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
#: Suffixes of the kernels' names.
TYPES = {torch.float32: "f32", torch.float64: "f64"}
#: Compiler flags to try in order, since not every compiler supports all of them.
FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())
#: Time limit of the compiler in seconds.
PATIENCE = 120

log = logging.getLogger(__name__)


class Kernels:
    """The compiled library.

    All tensors are contiguous, of one dtype of :data:`TYPES`, with images as (groups * channels, height, width, batch).
    ``sizes`` are groups, channels, height, width, batch, outputs per group, kernel height and width, and, for height
    and width, stride, padding, dilation and output size.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def convolution(
        self, images: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, sizes: list[int]
    ) -> None:
        """Compute a grouped convolution."""
        self._call("convolution", (images, weight, bias, result), sizes)

    def by_input(self, grad: Tensor, weight: Tensor, result: Tensor, sizes: list[int]) -> None:
        """Compute the gradient with respect to the images."""
        self._call("by_input", (grad, weight, result), sizes)

    def by_weight(self, grad: Tensor, images: Tensor, result: Tensor, sizes: list[int]) -> None:
        """Compute the gradient with respect to the weight."""
        self._call("by_weight", (grad, images, result), sizes)

    def tanh(self, x: Tensor, result: Tensor) -> None:
        """Compute the hyperbolic tangent in single precision, to about two units in the last place."""
        threads = ctypes.c_int(torch.get_num_threads())
        self._library.tanh_f32(_address(x), _address(result), ctypes.c_int64(x.numel()), threads)

    def _call(self, name: str, tensors: Sequence[Tensor | None], sizes: list[int]) -> None:
        given = (ctypes.c_int64 * len(sizes))(*sizes)
        result = tensors[-1]
        assert result is not None
        kernel = getattr(self._library, f"{name}_{TYPES[result.dtype]}")
        kernel(*map(_address, tensors), given, ctypes.c_int(torch.get_num_threads()))


def _address(tensor: Tensor | None) -> Any:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def kernels(like: Tensor) -> Kernels | None:
    """Return the kernels if they support tensors like this one."""
    return library() if like.device.type == "cpu" and like.dtype in TYPES else None


@functools.cache
def library() -> Kernels | None:
    """Return the compiled kernels, or None if they are disabled or cannot be compiled."""
    if os.environ.get("FL_LIGHTNING_NATIVE") == "0":
        return None
    for compiler in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if compiler and shutil.which(compiler):
            for flags in FLAGS:
                try:
                    return _loaded(compiler, flags, cache_folder())
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
                    log.info("%s %s cannot compile the kernels: %s", compiler, " ".join(flags), error)
    return None


def _loaded(compiler: str, flags: Sequence[str], folder: Path) -> Kernels:
    path = compiled(compiler, flags, folder)
    try:
        return Kernels(path)
    except OSError:  # damaged: compile it again
        path.unlink()
        return Kernels(compiled(compiler, flags, folder))


def compiled(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Return the path of the library in the folder, compiled if necessary."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=PATIENCE, check=True).stdout
    key = hashlib.sha256(b"\n".join([SOURCE.read_bytes(), version, repr((flags, machine())).encode()]))
    path = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # several processes may compile at once
            made = Path(own) / path.name
            command = [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", *flags, "-o", str(made), str(SOURCE)]
            subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
            os.replace(made, path)
    return path


def machine() -> str:
    """Identify this processor's instruction set, because machines may share the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def cache_folder() -> Path:
    """Return the folder for the compiled library."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fl_lightning"
