"""README as the package index shows it, with links that work there; all else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]


def absolute(link: re.Match[str]) -> str:
    """A link of Markdown with the repository's address before a relative target."""
    picture, text, target = link.groups()
    return f"{picture}[{text}]({HOME}/{'raw' if picture else 'blob'}/main/{target})"


RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
README = (ROOT / "README.md").read_text(encoding="utf-8")
setup(long_description=RELATIVE.sub(absolute, README), long_description_content_type="text/markdown")
