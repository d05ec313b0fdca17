"""TensorBoard on loopback, and screenshots of pages if Chromium is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest


class Board:
    """A TensorBoard that serves a folder on loopback until this process ends."""

    def __init__(self, folder: Path) -> None:
        from tensorboard import program

        board = program.TensorBoard()
        options = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", "--load_fast=false"]
        board.configure(argv=["tensorboard", *options, "--reload_interval=1"])
        self.url = board.launch()

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of a route."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def wait(self, path: str, runs: int = 1) -> Any:
        """Call ``get`` until enough runs have been read."""
        for _ in range(300):
            found = self.get(path)
            if len([value for value in found.values() if value]) >= runs:
                return found
            time.sleep(0.1)
        raise AssertionError(f"TensorBoard has nothing to say on {path}")


def screenshot(url: str, path: Path, width: int = 1400, height: int = 1600) -> None:
    """Save a screenshot of a page, or skip the test without a browser."""
    said = _browse(url, f"--window-size={width},{height}", f"--screenshot={path}")
    assert path.exists(), said.stderr


def page_text(url: str) -> str:
    """Return a page after its scripts have run, or skip the test without a browser."""
    return _browse(url, "--dump-dom").stdout


def _browse(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to take a picture with")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=15000", *quiet]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *common, f"--user-data-dir={profile}", *options, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def colours(path: Path) -> int:
    """Count the colours of a picture; a blank page has few."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0))
