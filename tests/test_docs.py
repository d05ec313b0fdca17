"""Every relative link and image in README.md and docs/ leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

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
