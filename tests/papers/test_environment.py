"""Records say with which code and on which machine they were made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from fl_lightning.papers.environment import PACKAGES, commit, environment


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_commit_is_that_of_the_source_tree_and_says_whether_it_was_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit(tmp_path) == head
    (tmp_path / "notes.txt").write_text("not part of the code\n")
    assert commit(tmp_path) == head
    (tmp_path / "code.py").write_text("a = 2\n")
    assert commit(tmp_path) == f"{head}-dirty"


def test_versions_threads_and_processor_are_kept() -> None:
    found = environment()
    assert torch.__version__.startswith(found["packages"]["torch"])
    assert set(found["packages"]) == set(PACKAGES)
    assert found["threads"] == torch.get_num_threads()
    assert found["processor"]
    assert len(found["date"]) == len("2026-01-01")
