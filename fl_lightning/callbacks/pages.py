"""Pages and charts of logged metrics, for the dashboard and the report.

Metrics need no registration. Unknown names are on the page Method, in one chart for all names that differ only in their
middle or in a trailing number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fl_lightning.measure import ACCURACY, SPELT, Measure

#: Pages in the order of the tabs, with the prefixes of their metrics; the last page takes the rest.
PAGES: dict[str, re.Pattern[str]] = {
    "Scores": re.compile(
        r"(train|val|test)/(?!(gap|(variance|worst10)(_corrected)?|jain|entropy|local_gap|local_worse)$)"
    ),
    "Fairness": re.compile(r"(val|test)/|fairness/"),
    "Privacy": re.compile(r"(privacy|attack|membership|inversion|leakage|dp|defence)s?[/_]|(.*[/_])?epsilon"),
    "Communication": re.compile(r"(comm|clients|ledger|speed|time)/"),
    "Method": re.compile(r""),
}
#: Groups of metrics written to TensorBoard a second time, in display units.
GROUPS = {"%": "percent", "MB": "MB"}
#: Suffixes of shares among the metrics of attacks and methods.
_SHARES = re.compile(r"^personal/|(accuracy|attack_acc|tpr_at_\d+|used|moved)(_low|_high)?$")
#: Metrics of Lightning that get no chart.
_HIDDEN = re.compile(r"epoch$|hp_metric$|lr-")

#: Suffixes of scores over clients: their names, and whether they have the headline metric's unit.
_OVER_CLIENTS = {
    "": ("mean over clients", True),
    "_worst10": ("worst tenth of the clients", True),
    "_std": ("standard deviation over clients", True),
    "_median": ("median client", True),
    "_low": ("10 % of the clients are below", True),
    "_high": ("10 % of the clients are above", True),
    "_majority": ("majority", True),
    "_minority": ("minority", True),
}
_WORDS = {
    "train/loss": "training loss",
    "gap": "gap between majority and minority",
    "variance": "variance over clients",
    "variance_corrected": "variance, corrected for few samples",
    "worst10_corrected": "worst tenth, corrected for few samples",
    "jain": "Jain index",
    "entropy": "entropy",
    "local_gap": "better than training alone by",
    "local_worse": "clients worse off than alone",
    "comm/up_bytes": "sent up, in a round",
    "comm/down_bytes": "sent down, in a round",
    "comm/up_total": "sent up, so far",
    "comm/down_total": "sent down, so far",
    "clients/trained": "clients that trained",
    "clients/left_out": "clients left out",
    "time/clients": "time at the clients",
    "time/server": "time at the server",
}
_SPELT = SPELT | {"tpr": "TPR", "fpr": "FPR", "psnr": "PSNR", "ssim": "SSIM", "kl": "KL"}


class Chart(NamedTuple):
    """A chart: its title, and regular expressions for the names of its lines.

    With ``band`` the three names are a line and the edges of a band around it.
    """

    title: str
    tags: tuple[str, ...]
    band: bool = False


#: Charts of metrics of every run and of the fairness callback; ``val`` stands for ``test`` if nothing is held out,
#: and ``acc`` for the headline metric.
KNOWN = (
    Chart("mean over clients", (r"val/acc$", r"val/global_acc$")),
    Chart("worst tenth of the clients", (r"val/acc_worst10$",)),
    Chart("majority and minority", (r"val/acc_majority$", r"val/acc_minority$")),
    Chart("clients: median, first to ninth decile", ("val/acc_median", "val/acc_low", "val/acc_high"), band=True),
    Chart("standard deviation over clients", (r"val/acc_std$",)),
    Chart("loss", (r"train/loss$", r"val/loss$")),
    Chart("gap between majority and minority", (r"val/gap$",)),
    Chart("variance over clients", (r"val/variance$",)),
    Chart("variance, corrected for few samples", (r"val/variance_corrected$",)),
    Chart("worst tenth, corrected for few samples", (r"val/worst10_corrected$",)),
    Chart("evenness: Jain index and entropy", (r"val/jain$", r"val/entropy$")),
    Chart("against training alone", (r"val/local_gap$", r"val/local_worse$")),
    Chart("sent up and down in a round", (r"comm/up_bytes$", r"comm/down_bytes$")),
    Chart("sent up and down so far", (r"comm/up_total$", r"comm/down_total$")),
    Chart("clients trained and left out", (r"clients/trained$", r"clients/left_out$")),
)


def page_of(tag: str) -> str:
    """Return the page of a logged metric.

    Example:
        >>> page_of("val/acc_worst10"), page_of("val/gap"), page_of("factors/fc1/active")
        ('Scores', 'Fairness', 'Method')
    """
    return next(page for page, pattern in PAGES.items() if pattern.match(tag))


def charts(tags: Iterable[str], headline: str = "acc") -> dict[str, list[Chart]]:
    """Return the non-empty pages and their charts.

    Args:
        tags: names of the logged metrics.
        headline: name of the headline metric.

    Example:
        >>> charts(["factors/fc1/active", "factors/fc2/active", "agents/weight_0", "agents/weight_1"])["Method"]
        [Chart(title='factors: active', tags=('factors/.*/active$',), band=False), \
Chart(title='agents: weight', tags=('agents/weight_[0-9]+$',), band=False)]
    """
    left = {tag for tag in tags if not _HIDDEN.match(tag)}
    held_out = any(tag.startswith("val/") for tag in left)
    left = {tag for tag in left if not (held_out and tag.startswith("test/"))}
    pages: dict[str, list[Chart]] = {page: [] for page in PAGES}
    for known in KNOWN:
        names = [tag.replace("/acc", f"/{headline}").replace("global_acc", f"global_{headline}") for tag in known.tags]
        chart = known._replace(tags=tuple(names if held_out else (name.replace("val/", "test/") for name in names)))
        found = {tag for tag in left if any(re.fullmatch(pattern.rstrip("$"), tag) for pattern in chart.tags)}
        if found and (len(found) == 3 or not chart.band):
            pages[page_of(min(found))].append(chart)
        left -= found
    for tag in sorted(left, key=lambda tag: list(tags).index(tag)):
        chart = _chart(tag)
        if chart not in pages[page_of(tag)]:
            pages[page_of(tag)].append(chart)
    return {page: shown for page, shown in pages.items() if shown}


def _chart(tag: str) -> Chart:
    """Return the chart of an unknown name: one for all layers, one for all numbered clients or clusters."""
    first, *middle, last = tag.split("/") if "/" in tag else ("other", tag)
    # A separate number: weight/3, weight_3; but f1 and fc1 are names.
    numbered = re.fullmatch(r"()\d+" if middle else r"(.*[_-])\d+", last)
    if numbered:
        stem = "/".join([*([first] if "/" in tag else []), *middle, numbered[1]])
        title = ": ".join(filter(None, [first, "/".join([*middle, numbered[1].rstrip("_-")]).strip("/")]))
        return Chart(title, (f"{stem}[0-9]+$",))
    if middle:
        return Chart(f"{first}: {last}", (f"{first}/.*/{last}$",))
    spelt = words(tag) if first in ("val", "test") or tag in _WORDS else f"{first}: {last}"
    return Chart(spelt if "/" in tag else tag, (f"{tag}$",))


def words(tag: str, measure: Measure = ACCURACY) -> str:
    """Return the display name of a logged metric.

    Args:
        tag: name of the logged metric.
        measure: the headline metric.

    Example:
        >>> words("val/acc_worst10"), words("val/mae_std"), words("membership/outsider/tpr_at_1")
        ('worst tenth of the clients', 'MAE, standard deviation over clients', 'membership, outsider, TPR at 1')
    """
    split, _, name = tag.partition("/")
    if tag in _WORDS:
        return _WORDS[tag]
    if split in ("val", "test"):
        if name == f"global_{measure.name}":
            return "the server's model"
        ending = name.removeprefix(measure.name)
        if ending != name and ending in _OVER_CLIENTS:
            return _OVER_CLIENTS[ending][0]
        if name == "loss":
            return "loss on held-out samples" if split == "val" else "loss on test samples"
        if name in _WORDS:
            return _WORDS[name]
        other, _, ending = name.rpartition("_")
        if other and f"_{ending}" in _OVER_CLIENTS:
            return f"{_SPELT.get(other, other)}, {_OVER_CLIENTS[f'_{ending}'][0]}"
        tag = name
    return ", ".join(" ".join(_SPELT.get(word, word) for word in part.split("_")) for part in tag.split("/"))


def in_unit(tag: str, measure: Measure = ACCURACY) -> tuple[str, float]:
    """Return the name of a logged metric in its display unit, and the conversion factor.

    Names without another unit are returned unchanged.

    Example:
        >>> in_unit("val/acc"), in_unit("comm/up_bytes"), in_unit("val/jain")
        (('percent/val/acc', 100.0), ('MB/comm/up_bytes', 1e-06), ('val/jain', 1.0))
    """
    label, factor = unit(tag, measure)
    return (tag, 1.0) if factor == 1 else (f"{GROUPS[label]}/{tag}", factor)


def unit(tag: str, measure: Measure = ACCURACY) -> tuple[str, float]:
    """Return the display unit of a logged metric, and the conversion factor.

    Example:
        >>> unit("comm/up_bytes"), unit("val/acc_std"), unit("time/server"), unit("val/jain")
        (('MB', 1e-06), ('%', 100.0), ('s', 1.0), ('', 1.0))
    """
    split, _, name = tag.partition("/")
    if page_of(tag) in ("Privacy", "Method") and _SHARES.search(tag):
        return "%", 100.0
    if name.endswith(("bytes", "_total")) and split in ("comm", "ledger"):
        return "MB", 1e-6
    if split == "time":
        return "s", 1.0
    if split in ("val", "test"):
        own = name.removeprefix("global_")
        ending = own.removeprefix(measure.name)
        of_clients = own == measure.name or (ending != own and ending.startswith("_"))
        if of_clients or name in ("gap", "local_gap", "worst10", "worst10_corrected"):
            return ("%" if measure.share else ""), measure.scale
        if name in ("variance", "variance_corrected") and measure.share:
            return "%²", 1.0
        if name == "local_worse":
            return "%", 100.0
    return "", 1.0
