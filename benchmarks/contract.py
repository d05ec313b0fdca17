"""How long methods are and how far one round walks: ``python -m benchmarks.contract [ROOT]``.

Lines of code are those of a method's file without imports, docstrings, comments and blank lines. A walk counts the
files of the library that one round enters, and the calls from one file into another.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
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


def walk(package: str, work: Callable[[], Any]) -> tuple[int, int]:
    """Files entered and calls from one file into another while something is done."""
    files: set[str] = set()
    crossed = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal crossed
        name = frame.f_code.co_filename
        if event != "call" or package not in name:
            return
        files.add(name)
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        crossed += package in caller and caller != name

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(files), crossed


def rounds(root: Path) -> dict[str, tuple[int, int]]:
    """The walks of one round of FedAvg and of WAFFLe, four clients, stacked."""
    sys.path.insert(0, str(root))
    from fl_lightning.callbacks import FederatedCallback
    from fl_lightning.methods import FedAvg, WAFFLe
    from tests.support import blobs, fit, mlp

    found = {}
    for name, method in (
        ("FedAvg", FedAvg(mlp(), engine="stacked")),
        ("WAFFLe", WAFFLe(mlp(), {"fc1": 6}, epochs=2, engine="stacked")),
    ):
        step = method.training_step

        def counted(batch: Any, index: int, step: Any = step, name: str = name) -> None:
            found[name] = walk("fl_lightning", lambda: step(batch, index))

        method.training_step = counted  # type: ignore[method-assign, assignment]
        fit(method, blobs(), 1, callbacks=[FederatedCallback()], limit_val_batches=0)
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
        print(f"{name}: {files} files entered, {crossed} calls from one file into another")
