"""Disk space of memory-mapped files is allocated before they are written to."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import FederationError
from fl_lightning.scratch import reserve


def test_a_file_grows_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    reserve(path, 80)
    torch.from_file(str(path), shared=True, size=10, dtype=torch.float64).copy_(torch.arange(10.0))
    reserve(path, 8000)
    assert path.stat().st_size == 8000
    assert path.stat().st_blocks * 512 >= 8000  # not a hole
    found = torch.from_file(str(path), shared=True, size=1000, dtype=torch.float64)
    assert torch.equal(found[:10], torch.arange(10, dtype=torch.float64))
    reserve(path, 80)
    assert path.stat().st_size == 8000


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FederationError, match=r"no room for 3\.0 MB of client state in .*make room"):
        reserve(tmp_path / "rows", 3_000_000)


def test_a_file_size_limit_is_a_clear_error_not_a_signal(tmp_path: Path) -> None:
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            reserve(tmp_path / "rows", 8192)
        except FederationError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
