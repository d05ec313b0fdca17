"""How long methods are and how far one round walks: ``python benchmarks/contract.py [ROOT]``.

Lines of code are those of a method's file without imports, docstrings, comments and blank lines. A walk counts the
files of the library that one round enters, and the calls from one file into another: of the round itself, and of the
round with the evaluation after it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any

NAMES = ["fedprox", "scaffold", "ifca", "apfl", "pfedme", "fedper", "lg_fedavg", "local", "qffl", "fesem", "fedcluster"]
NAMES += ["fedgroup", "fedma", "feddaf", "fedbps", "waffle", "waffle_l1", "waffle_avg", "weight_erosion"]


def code_lines(source: str) -> int:
    """Lines that hold code."""
    tree = ast.parse(source)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            doc = node.body[0]
            left_out.update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in left_out for n, line in lines)


class Walk:
    """Counts files entered, and calls from one file into another, while it is switched on.

    Args:
        package: what the paths of the files that count have in them.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.files: set[str] = set()
        self.crossed = 0

    def look(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call."""
        name = frame.f_code.co_filename
        if event != "call" or self.package not in name:
            return
        self.files.add(name)
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        self.crossed += self.package in caller and caller != name


def rounds(root: Path) -> dict[str, tuple[int, int]]:
    """The walks of one round of FedAvg and of WAFFLe, four clients, stacked, without and with evaluation."""
    sys.path.insert(0, str(root))
    from lightning.pytorch import Callback

    from fl_lightning.methods import FedAvg, WAFFLe
    from tests.support import blobs, fit, mlp

    class Switch(Callback):
        """Walks from the beginning of the round to its end, or to the end of the evaluation."""

        def __init__(self, walk: Walk, last: str) -> None:
            self.walk, self.last = walk, last

        def on_train_batch_start(self, *args: Any) -> None:
            sys.setprofile(self.walk.look)

        def on_train_batch_end(self, *args: Any) -> None:
            sys.setprofile(self.walk.look if self.last == "evaluation" else None)

        def on_validation_end(self, *args: Any) -> None:
            sys.setprofile(None)

    found = {}
    for last in ("round", "evaluation"):
        for method in (FedAvg(mlp(), engine="stacked"), WAFFLe(mlp(), {"fc1": 6}, epochs=2, engine="stacked")):
            walk = Walk(f"{root}/fl_lightning/")
            fit(method, blobs(), 1, callbacks=[Switch(walk, last)])
            found[f"{type(method).__name__} {last}"] = len(walk.files), walk.crossed
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    for name in NAMES:
        found = [
            path
            for path in (root / "fl_lightning" / "methods").glob(f"{name}*.py")
            if path.stem in (name, f"{name}_factor")
        ]
        for path in found:
            print(f"{path.stem:20s} {code_lines(path.read_text()):4d}")
    for name, (files, crossed) in rounds(root).items():
        print(f"{name:<18} {files} files entered, {crossed} calls from one file into another")
