"""The documentation: links lead somewhere, nothing is left out, and the site builds without warnings or network."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import yaml

from fl_lightning import methods
from fl_lightning.datamodules import Digits, partitions
from fl_lightning.module import FederatedModule
from tests.support.browser import page_text

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)>\s]+)|^\[[^\]]+\]:\s*<?([^>\s]+)|(?:src|href|srcset)=[\"']([^\"']+)", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)


def relative_links(text: str) -> list[str]:
    """Targets of the relative links and images in Markdown, without code, titles and fragments."""
    targets = (next(filter(None, found)) for found in LINK.findall(CODE.sub("", text)))
    return [unquote(target.partition("#")[0]) for target in targets if not ELSEWHERE.match(target)]


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead to no file or folder."""
    links = relative_links(page.read_text(encoding="utf-8"))
    return [link for link in links if not (ROOT / link[1:] if link.startswith("/") else page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist(page: Path) -> None:
    assert broken_links(page) == []


def test_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](one.md) [![b](two%20b.png 'title')](three.md#part) [c](https://example.org/x) [d](#here) [e](<four.md>)\n"
        "[f]: five.md\n[g]: mailto:a@example.org\n"
        "<img src='six.svg'> `[h](in code)`\n```\n[i](in a block)\n```\n[j](there.md)\n"
    )
    (tmp_path / "there.md").touch()
    assert broken_links(page) == ["one.md", "two b.png", "three.md", "four.md", "five.md", "six.svg"]


class Page(HTMLParser):
    """Links, loads and anchors of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        loaded = tag in ("script", "img", "link", "source", "iframe")
        target = given.get("src") or given.get("href") or ""
        if loaded and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(target)
        elif target:
            self.links.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as ``make docs`` builds it."""
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    path = {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_and_needs_no_network(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 50
    for path, page in pages.items():
        assert [load for load in page.loads if re.match(r"https?:|//", load)] == [], path
    exported = (site / "api" / "methods.html").read_text()
    assert [name for name in methods.__all__ if f'id="fl_lightning.methods.{name}"' not in exported] == []


@pytest.mark.slow
def test_links_within_the_site_work(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, _, part = link.partition("#")
            if path.name == "404.html" or (ELSEWHERE.match(link) and not link.startswith("#")):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            if not there.exists() or (part and there in pages and unquote(part) not in pages[there].ids):
                broken.append((str(path.relative_to(site)), link))
    assert [link for link in broken if link[1] not in ("#", "#__skip")] == []


@pytest.mark.slow
def test_methods_show_what_was_measured(site: Path) -> None:
    assert "Tables of results" in (site / "methods" / "waffle.html").read_text()


@pytest.mark.slow
def test_pages_opened_as_files_can_be_searched(site: Path) -> None:
    found = page_text(f"file://{site}/index.html?q=scaffold")
    assert re.search(r"\d+ matching documents", found), "docs/assets/iframe-worker.js runs the search"
    assert 'href="file' in found
    assert not re.search(r'href="[^"]*source/fl_lightning[^"]*" class="md-search-result', found), "sources are left out"


@pytest.mark.slow
def test_every_command_has_a_page_with_its_options(site: Path) -> None:
    from fl_lightning.cli.commands import COMMANDS

    for command in COMMANDS:
        text = (site / "cli" / f"{command}.html").read_text()
        assert "usage: fl-lightning" in text, command
    assert "--model.help" in (site / "cli" / "fit.html").read_text()


def test_every_method_has_a_page_that_names_its_code_and_readme_has_a_line() -> None:
    pages = {page: page.read_text() for page in (ROOT / "docs" / "methods").glob("*.md")}
    homes = {name: getattr(methods, name).__module__.rpartition(".")[2] for name in methods.__all__}
    found = {name: [p for p, text in pages.items() if f"methods/{home}.py" in text] for name, home in homes.items()}
    assert [name for name, at in found.items() if not at] == []
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in pages if f"docs/methods/{page.name}" not in readme] == []


def test_every_option_of_a_method_is_on_its_page() -> None:
    """Or on that of FedAvg, where those stand that all methods have."""
    pages = [page.read_text() for page in (ROOT / "docs" / "methods").glob("*.md")]
    for name in methods.__all__:
        kinds = [kind for kind in getattr(methods, name).__mro__ if issubclass(kind, FederatedModule)]
        own = set().union(*(inspect.signature(kind).parameters for kind in kinds)) - {"net", "kwargs"}
        homes = {f"methods/{kind.__module__.rpartition('.')[2]}.py" for kind in (kinds[0], methods.FedAvg)}
        said = "".join(text for text in pages if any(home in text for home in homes))
        assert [option for option in sorted(own) if not re.search(rf"`{option}\b", said)] == [], name


def test_tables_of_options_are_those_of_the_constructors() -> None:
    scope: dict[str, Any] = {"__file__": str(ROOT / "docs" / "options.py"), "__name__": "options"}
    exec(compile((ROOT / "docs" / "options.py").read_text(), "docs/options.py", "exec"), scope)
    tables = [found for page in scope["PAGES"].glob("*.md") for found in scope["BLOCK"].findall(page.read_text())]
    for page in scope["PAGES"].glob("*.md"):
        assert scope["written"](page.read_text()) == page.read_text(), "make options writes it again"
    assert len({name for _, name, _ in tables}) == len(methods.__all__) - 1, "all but SCAFFOLD, which adds none"
    row = "| `mu` | 0 or more | 0.01 | "
    assert row in (ROOT / "docs" / "methods" / "fedprox.md").read_text()


def test_every_partition_has_a_part_with_a_picture() -> None:
    text = (ROOT / "docs" / "partitions.md").read_text()
    parts = {part.partition("\n")[0]: part for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]}
    base = partitions.PartitionScheme
    schemes = {n for n in partitions.__all__ if issubclass(getattr(partitions, n), base)} - {base.__name__}
    assert [name for name in sorted(schemes) if "](pictures/partition-" not in parts.get(name, "")] == []


def test_commands_in_the_pages_are_commands() -> None:
    from fl_lightning.cli.commands import COMMANDS

    for page in PAGES:
        said = re.findall(r"(?:^|`|\(| {4})fl-lightning ([a-z]+)", page.read_text(), flags=re.MULTILINE)
        assert set(said) <= set(COMMANDS), page


def test_the_python_code_of_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), flags=re.DOTALL)
    options = "max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False"
    exec(code.replace("max_epochs=30", options), {})


def draw() -> dict[str, object]:
    scope: dict[str, object] = {"__file__": str(ROOT / "docs" / "draw.py"), "__name__": "draw"}
    exec(compile((ROOT / "docs" / "draw.py").read_text(), "docs/draw.py", "exec"), scope)
    return scope


def test_the_example_of_a_custom_scheme_is_complete() -> None:
    page = (ROOT / "docs" / "partitions.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Halves" in code)
    found: dict[str, Any] = {}
    exec(code, found)
    partition = found["Halves"]()(torch.arange(40) % 10, seed=0, train_size=40)
    assert [len(part[client]) for part in (partition.train, partition.test) for client in (0, 1)] == [10] * 4


def test_readmes_table_is_that_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| WAFFLe (as published) |" in readme
    assert draw()["with_table"](readme) == readme, "make pictures writes it again"  # type: ignore[operator]


def test_pictures_of_partitions_can_be_redrawn(tmp_path: Path) -> None:
    drawn = draw()["draw_partitions"](tmp_path, Digits, ("iid", "by-user"))  # type: ignore[operator]
    assert [path.name for path in drawn] == ["partition-iid.png", "partition-by-user.png"]
    assert all(path.stat().st_size > 5000 for path in drawn)
    known = {f"partition-{name}.png" for name in draw()["PARTITIONS"]}  # type: ignore[attr-defined]
    there = {path.name for path in (ROOT / "docs" / "pictures").glob("partition-*.png")}
    assert there == known | {"partition-by-user.png"}


def test_the_sites_settings_are_read_by_mkdocs_alone() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert "nav" not in settings, "docs/hooks.py makes it"


def test_adding_a_method_is_shown_from_scratch() -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    assert '--8<-- "examples/own_method.py"' in page
    assert '--8<-- "examples/ditto.py"' in page


@pytest.mark.parametrize("folder", ["fl_lightning", "tests", "benchmarks", "docs", "examples"])
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted((ROOT / folder).rglob("*.py")):
        found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
        texts = [text for node in found if (text := ast.get_docstring(node))]
        wrong = [text.partition("\n")[0] for text in texts if re.match(r"(What|Whoever|Those|As)\b", text)]
        assert wrong == [], path
