"""Which page and chart a logged number belongs to."""

from __future__ import annotations

import re

import pytest

from fl_lightning.callbacks.pages import PAGES, charts, page_of


@pytest.mark.parametrize(
    ("tag", "page"),
    [
        ("val/acc", "Scores"),
        ("val/acc_mode_3", "Scores"),
        ("val/global_acc", "Scores"),
        ("train/loss", "Scores"),
        ("val/jain", "Fairness"),
        ("val/local_worse", "Fairness"),
        ("privacy/epsilon", "Privacy"),
        ("attack/membership/auroc", "Privacy"),
        ("dp/epsilon", "Privacy"),
        ("comm/up_bytes", "Communication"),
        ("ledger/up_bytes", "Communication"),
        ("factors/fc1/active", "Method"),
        ("agents/weight_3", "Method"),
        ("anything", "Method"),
    ],
)
def test_page(tag: str, page: str) -> None:
    assert page_of(tag) == page


def test_every_number_is_in_exactly_one_chart() -> None:
    tags = ["val/acc", "val/global_acc", "val/acc_low", "val/acc_median", "val/acc_high", "val/gap", "epoch"]
    tags += ["factors/fc1/active", "factors/fc2/active", "factors/kl_b", "agents/weight_0", "agents/weight_11"]
    tags += ["clusters/size/0", "clusters/size/1", "mask", "layer3/share", "comm/up_bytes", "personal/fc1"]
    tags += ["membership/outsider/f1", "membership/insider/f1", "membership/insider/tpr_at_1"]
    pages = charts(tags)
    assert list(pages) == [page for page in PAGES if page in pages]
    found = [
        tag
        for chart in (chart for shown in pages.values() for chart in shown)
        for tag in tags
        if any(re.fullmatch(p, tag) if chart.band else re.match(p, tag) for p in chart.tags)
    ]
    assert sorted(found) == sorted(set(tags) - {"epoch"})
    titles = [chart.title for chart in pages["Method"]]
    expected = ["factors: active", "factors: kl_b", "agents: weight", "clusters: size", "mask", "layer3: share"]
    assert titles == [*expected, "personal: fc1"]
    assert [chart.title for chart in pages["Privacy"]] == ["membership: f1", "membership: tpr_at_1"]


def test_a_band_needs_all_three_of_its_lines() -> None:
    assert [chart.band for chart in charts(["val/acc", "val/acc_low"])["Scores"]] == [False]


def test_pages_without_numbers_are_left_out() -> None:
    assert list(charts(["comm/up_bytes"])) == ["Communication"]
    assert charts(["epoch", "hp_metric"]) == {}
