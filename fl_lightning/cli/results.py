"""``docs/results.md``: every measured cell beside its published value, written from the files in ``results``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fl_lightning.cli.tables import label, tables

HEAD = """# Results

Published tables beside what this library measured, written by `fl-lightning reproduce` from the files in `results/`.
Nothing here was typed in. "Paper" is the published value, "-" where the paper has none; "measured" is the mean over
seeds with the sample standard deviation, of the final round. Accuracies and gaps in percent, variances in percent²,
PSNR in dB, sizes in bytes. Attacks (mia: membership inference) are those of the named view, each figure the highest
that any of them reaches; without a view, the outsider's plain one, as the papers have it. Views and attacks:
[privacy](privacy.md).

To measure a table again: `fl-lightning reproduce TABLE --seeds 0 1 2 --jobs 2`. What its runs took, one thread each, is
said below it; most ran beside another one.
"""


def figure(value: float | None, std: float | None) -> str:
    """A number with its standard deviation, or a dash."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if float(value).is_integer() and value > 1000 else f"{value:.2f}"
    return text if std is None else f"{text} ± {std:.2f}"


def write_page(results: Path, docs: Path) -> None:
    """Write ``docs/results.md`` from the result files of all tables; other files in the folder are let be."""
    parts, known = [HEAD], {name.replace("/", "_"): name.replace("/", "-") for name in tables()}
    for path in sorted(path for path in results.glob("*.json") if path.stem in known):
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        parts.append(section(path.stem, rows))
        for picture in sorted((docs / "pictures").glob(f"results-{known[path.stem]}-*.png")):
            parts.append(f"![{picture.stem.removeprefix('results-')}](pictures/{picture.name})\n")
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "results.md").write_text("\n".join(parts))


def section(name: str, rows: list[dict[str, Any]]) -> str:
    """One table of the page."""
    lines = [
        f"## {name}",
        "",
        "| cell | metric | paper | measured | difference | scale | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        measured, published = row["measured"], row["value"]
        difference = "" if published is None else f"{measured['mean'] - published:+.2f}"
        cells = (
            label(row),
            row["metric"],
            figure(published, row.get("std")),
            figure(measured["mean"], measured["std"]),
            difference,
            measured["scale"],
            " ".join(map(str, measured["seeds"])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", time_of(rows), ""])


def time_of(rows: list[dict[str, Any]]) -> str:
    """How many runs a table's cells have, and how long they took."""
    found = [row["measured"] for row in rows]
    runs = {(one["config_hash"], seed): one["seconds"] for one in found for seed in one["seeds"]}
    hours, minutes = divmod(round(sum(runs.values()) / 60), 60)
    return f"{len(runs)} runs, {hours} h {minutes} min in all."
