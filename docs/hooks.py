"""Site of the repository: navigation, API pages, sources that pages link to, links to measured tables.

Everything is derived from the repository, so new methods, pages, commands and modules appear automatically.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File

from fl_lightning.cli.commands import COMMANDS, main, usage
from fl_lightning.papers import tables
from fl_lightning.papers.layout import Layout
from fl_lightning.papers.records import Records
from fl_lightning.sheet import markdown

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECORDS = Records(ROOT / "results")
#: Pages that are in their part of the sidebar, in order; those that are not there are left out, others are guides.
START = ["quickstart", "choose", "cheat-sheet", "examples", "concepts", "faq"]
GUIDES = ["own-data", "partitions", "own-task", "add-a-method", "fairness", "privacy", "deploy", "dashboard", "sweeps"]
GUIDES += ["gpu", "performance", "reliability", "coming-from"]
REFERENCE = ["architecture", "citing"]
#: Pages of the repository that are pages of the site, too.
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\(\s*)([^)\s#]+)(#[^)\s]*)?(\s*\))")


def on_config(config: Any) -> Any:
    """The navigation, from the pages that there are."""
    config.nav = navigation()
    return config


def navigation() -> list[Any]:
    """Five parts, each a tab of the site; a page that nobody ordered is a guide."""
    found = sorted(path.stem for path in DOCS.glob("*.md"))
    others = [name for name in found if name not in (*START, *GUIDES, *REFERENCE, "results")]

    def pages(names: list[str]) -> list[Any]:
        return [{title(DOCS / f"{name}.md"): f"{name}.md"} for name in names if name in found]

    return [
        {"Start": ["index.md", *pages(START)]},
        {"Guides": pages([*GUIDES, *others])},
        {"Methods": [{title(page): f"methods/{page.name}"} for page in method_pages()]},
        {"Results": ["results.md", *(f"results/{page}.md" for page in result_pages())]},
        {
            "Reference": [
                {"Command line": ["cli.md", *(f"cli/{command}.md" for command in COMMANDS)]},
                {"Python": [{module: f"api/{module}.md"} for module in modules()]},
                *pages(REFERENCE),
                *({title(ROOT / name): source_page(ROOT / name)} for name in OUTSIDE),
            ]
        },
    ]


def command_page(command: str) -> str:
    """The page of a command: one sentence, examples and the help text."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, COLUMNS="80"),
        mock.patch.object(sys, "argv", ["fl-lightning", command, "--help"]),
    ):
        main([command, "--help"])
    about = COMMANDS[command]
    example = f"\n```\n{chr(10).join(about.examples)}\n```\n" if about.examples else ""
    head = f"# fl-lightning {command}\n\n{about.help[0].upper()}{about.help[1:]}.\n"
    return f"{head}{example}\n```text\n{shortened(said.getvalue())}\n```\n"


def shortened(text: str) -> str:
    """A help text without escape codes and without a usage of many lines, which only repeats the options."""
    usage, _, rest = re.sub(r"\x1b\[[0-9;]*m|[^\x20-\x7e\n]", "", text).partition("\n\n")
    if usage.count("\n") > 12:
        usage = usage.replace("[options] ", "").partition(" [")[0] + " [options]"
    return f"{usage}\n\n{rest.strip()}"


def commands_page() -> str:
    """The list of all commands."""
    rows = [[f"[{name}](cli/{name}.md)", about.help] for name, about in COMMANDS.items()]
    head = "# Command line\n\n`fl-lightning COMMAND [options]`. Wrong input exits with one sentence and code 2.\n\n"
    return f"{head}{markdown(['command', 'purpose'], rows, left=2)}\n```text\n{usage()}\n```\n"


def method_pages() -> list[Path]:
    """The methods' pages, by title."""
    return sorted((DOCS / "methods").glob("*.md"), key=lambda page: title(page).lower())


def result_pages() -> list[str]:
    """The pages of results, as the first of them lists them at its end."""
    text = (DOCS / "results.md").read_text(encoding="utf-8").rpartition("## Pages")[2]
    return re.findall(r"\(results/([\w-]+)\.md\)", text)


def title(page: Path) -> str:
    """A page's first heading."""
    return page.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0].strip()


def modules() -> list[str]:
    """The library's public modules and packages, packages first."""
    package = ROOT / "fl_lightning"
    packages = sorted(p.parent.name for p in package.glob("*/__init__.py") if exports(p))
    return [*packages, *sorted(p.stem for p in package.glob("*.py") if not p.stem.startswith("_"))]


def exports(init: Path) -> list[str]:
    """The names in a package's ``__all__``."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def api_page(module: str) -> str:
    """The page of one module: everything that it exports, or all of its public members."""
    head = f"# fl_lightning.{module}\n\n"
    init = ROOT / "fl_lightning" / module / "__init__.py"
    if not init.exists():
        return head + f"::: fl_lightning.{module}\n    options: {{show_root_heading: false}}\n"
    return head + "\n".join(f"::: fl_lightning.{module}.{name}\n" for name in exports(init))


def on_files(files: Any, config: Any) -> Any:
    """Pages that are made, not written."""
    made = {f"api/{module}.md": api_page(module) for module in modules()}
    made["index.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    made["cli.md"] = commands_page()
    made |= {f"cli/{command}.md": command_page(command) for command in COMMANDS}
    for source in sorted({*sources(), *(ROOT / name for name in OUTSIDE)}):
        made[source_page(source)] = source_text(source)
    for path, text in made.items():
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, content=text))
    return files


def written() -> dict[str, tuple[Path, str]]:
    """The written pages by their place in the site: the folder that their links start from, and their text."""
    pages = {
        path.relative_to(DOCS).as_posix(): (path.parent, path.read_text(encoding="utf-8"))
        for path in DOCS.rglob("*.md")
    }
    outside = {"index.md": "README.md"} | {source_page(ROOT / name): name for name in OUTSIDE}
    return {place: (ROOT, (ROOT / name).read_text(encoding="utf-8")) for place, name in outside.items()} | pages


def sources() -> set[Path]:
    """Files outside docs/ that pages link to."""
    found = set()
    for folder, text in written().values():
        for _, target, *_ in LINK.findall(CODE.sub("", text)):
            path = Path(os.path.normpath(folder / target))
            if ":" not in target and path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
                found.add(path)
    return found


def source_page(source: Path) -> str:
    return f"source/{source.relative_to(ROOT).as_posix()}.md"


def source_text(source: Path) -> str:
    """A file as a page of the site."""
    name, text = source.relative_to(ROOT).as_posix(), source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    kind = {".py": "python", ".json": "json", ".yaml": "yaml"}.get(source.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{kind}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/ lead to pages of the site; methods show what was measured."""
    place = page.file.src_uri
    if place.startswith(("source/", "api/", "cli/")) and place not in written():
        return markdown
    if place.startswith("methods/"):
        markdown += measured(DOCS / place)
    folder = written()[place][0] if place in written() else DOCS
    here = (DOCS / place).parent
    parts, end = [], 0
    for code in [*CODE.finditer(markdown), None]:
        start = code.start() if code else len(markdown)
        parts.append(LINK.sub(lambda m: _relinked(m, folder, here), markdown[end:start]))
        parts.append(code.group() if code else "")
        end = code.end() if code else start
    return "".join(parts)


def _relinked(match: re.Match[str], folder: Path, here: Path) -> str:
    before, target, anchor, after = match.groups()
    path = Path(os.path.normpath(folder / target))
    if ":" in target or not path.exists():
        return match.group()
    if path.is_file() and not path.is_relative_to(DOCS):
        path = DOCS / source_page(path)
    return f"{before}{os.path.relpath(path, here)}{anchor or ''}{after}"


def measured(page: Path) -> str:
    """Where the methods whose code a page links to stand beside published values, or were studied."""
    text = page.read_text(encoding="utf-8")
    code = {Path(target).stem for _, target, *_ in LINK.findall(text) if "fl_lightning/methods/" in target}
    found = [line for line, modules in measurements() if modules & code]
    return "\n\n## Tables of results\n\n" + "\n".join(found) + "\n" if found else ""


@cache
def measurements() -> list[tuple[str, set[str | None]]]:
    """Every table of the pages of results: a line with a link to it, and the modules of its methods."""
    found = []
    for plan in tables.pages()["pages"]:
        for one in plan["tables"]:
            cells = [shown.cell for shown in Layout(RECORDS, one).shown if shown.measured is not None]
            modules = {module_of(cell) for cell in {cell["method"]: cell for cell in cells}.values()}
            anchor = slugify(one["title"], "-")
            line = f"- [{plan['title']}: {one['title']}](../results/{plan['name']}.md#{anchor})"
            found.append((line, modules))
    return found


def module_of(row: dict[str, Any]) -> str | None:
    """The module of the method that a measured cell is of."""
    try:
        name = tables.config_of(row)["model"]["class_path"].rpartition(".")[2]
    except (KeyError, StopIteration):
        return None
    init = ast.parse((ROOT / "fl_lightning/methods/__init__.py").read_text(encoding="utf-8"))
    homes = {a.name: n.module for n in init.body if isinstance(n, ast.ImportFrom) and n.module for a in n.names}
    return homes.get(name, "").rpartition(".")[2]
