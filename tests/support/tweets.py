"""Files of tweets in the format of Sentiment140."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fl_lightning.datamodules import corpus

WORDS = ["good", "bad", "happy", "sad", "sun", "rain", "cat", "dog", "tea", "rest", "work", "home"]


def row(label: int, user: str, text: str) -> str:
    return f'"{label}","1","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","{text}"\n'


def write(root: Path) -> Path:
    """Thirty tweets each of ten users, and five of the manual test file, one of them neutral; returns the root."""
    folder = root / "sentiment140"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = [row(4 * (i % 2), f"user{i // 30}", " ".join(rng.choice(WORDS, 6)) + f" only{i}") for i in range(300)]
    (folder / corpus.TRAIN_FILE).write_text("".join(lines), encoding="latin-1")
    tests = [row(label, "t", f"caf\xe9 tweet {label}") for label in (0, 2, 4, 4, 0)]
    (folder / corpus.TEST_FILE).write_text("".join(tests), encoding="latin-1")
    return root
