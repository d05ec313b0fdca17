"""Structure of the tests: shared helpers are in tests/support, and no test module imports another."""

from __future__ import annotations

import ast
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT) for folder in ("tests", "benchmarks", "docs") for path in ROOT.glob(f"{folder}/**/*.py")
)


def imports(path: Path) -> set[str]:
    """Modules that a file may mean by its imports, also by those within functions and in code that it passes on."""
    tree = ast.parse((ROOT / path).read_text())
    code = [tree]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            try:
                code.append(ast.parse(node.value))
            except SyntaxError:  # a sentence
                continue
    found: set[str] = set()
    for node in (node for part in code for node in ast.walk(part)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_imports_a_test_module(path: Path) -> None:
    wrong = [name for name in imports(path) if name.startswith("tests.") and ("test_" in name or ".conftest" in name)]
    assert not wrong, f"{path}: what tests share is in tests/support"


def test_helpers_are_in_support() -> None:
    files = [path for path in FILES if path.parts[0] == "tests" and path.name not in ("__init__.py", "conftest.py")]
    helpers = {path for path in files if not path.name.startswith("test_")}
    assert {path for path in helpers if path.parts[1] != "support"} == {Path("tests/golden/record.py")}
    assert {path for path in files if path.parts[1] == "support"} <= helpers


def test_the_breaks_on_purpose_fit_the_code_and_the_page_lists_them() -> None:
    """benchmarks/breaks.py changes lines that are there, and docs/reliability.md has what its last run printed."""
    breaks = run_path(str(ROOT / "benchmarks" / "breaks.py"))["BREAKS"]
    rows = [line.split(" | ") for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()]
    shown = {row[1]: row[2:] for row in rows if len(row) == 4 and row[0].startswith("| ")}
    for one in breaks:
        assert (ROOT / "fl_lightning" / one.path).read_text().count(one.line) == 1, one
        where, test = shown[one.what]
        path, name = test.strip("` |").split("::", 1)
        assert where == f"`{one.path}`"
        assert path.removeprefix("tests/") in one.tests.split()
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
