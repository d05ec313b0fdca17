"""The dashboard as TensorBoard serves it: pages, histograms, images and sortable runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from fl_lightning import pictures
from fl_lightning.callbacks import Dashboard, FactorsCallback, FairnessCallback, MembershipInferenceCallback, RunRecord
from fl_lightning.callbacks.dashboard import SKETCH, _sketched
from fl_lightning.cli.board import link
from fl_lightning.cli.runs import find
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, Local, WAFFLe, WeightErosion
from fl_lightning.module import FederatedModule
from tests.support import blobs, fit, mlp, weights
from tests.support.browser import Board, colours, screenshot

SIZES = (24, 16, 16, 16, 24, 16)
MODES = {"mode": [0, 0, 0, 0, 1, 1]}


class Offers(Callback):
    """A callback with a picture and a number of its own."""

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: Any) -> None:
        pl_module.log("agents/weight_0", 0.5, on_step=False, on_epoch=True, batch_size=1)
        pl_module.log("privacy/epsilon", 1.0, on_step=False, on_epoch=True, batch_size=1)

    def dashboard_figures(self, trainer: Trainer, module: Any) -> dict[str, Any]:
        return {"attack/grid": pictures.heat_map([0, 1], torch.rand(2, 3).numpy())}


def run(folder: Path, method: FederatedModule, *callbacks: Callback, rounds: int = 2, **kwargs: Any) -> Trainer:
    logger = TensorBoardLogger(folder, name=type(method).__name__, version="")
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "precision": "32-true", **kwargs}
    return fit(method, blobs(SIZES, meta=MODES), rounds, callbacks=[*callbacks], **settings)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    """Two methods, each with the callbacks that suit it."""
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"lr": 0.1, "batch_size": 8, "engine": "stacked"}
    run(folder, FedAvg(mlp(), **options), Dashboard(), FairnessCallback())
    waffle = WAFFLe(mlp(), factors={"fc1": 6}, epochs=2, **options)
    run(folder, waffle, FairnessCallback(), FactorsCallback(), Offers(), Dashboard(images_every=1))
    board = Board(folder)
    board.wait("data/plugin/images/tags", runs=2)
    board.wait("data/plugin/custom_scalars/layout")
    return board


def test_pages_are_filled_by_the_callbacks_that_are_on(board: Board) -> None:
    layout = board.get("data/plugin/custom_scalars/layout")
    pages = {page["title"]: {chart["title"]: chart for chart in page["chart"]} for page in layout["category"]}
    assert set(pages) == {"Scores", "Fairness", "Privacy", "Communication", "Method"}
    accuracy = list(pages["Scores"])
    assert {"mean over clients (%)", "worst tenth of the clients (%)", "majority and minority (%)"} <= set(accuracy)
    band = pages["Scores"]["clients: median, first to ninth decile (%)"]["margin"]["series"][0]
    assert band == {
        end: f"percent/test/acc_{tag}" for end, tag in (("value", "median"), ("lower", "low"), ("upper", "high"))
    }
    assert {"gap between majority and minority (%)", "variance over clients (%²)"} <= set(pages["Fairness"])
    assert {"factors: active", "agents: weight"} <= set(pages["Method"])
    assert len(accuracy) == len(set(accuracy)), "two runs share their charts"


def test_an_attack_after_the_last_round_fills_the_privacy_page_and_the_record(tmp_path: Path) -> None:
    attack = MembershipInferenceCallback(shadows=1, clients=1, views=["outsider"])
    run(tmp_path, FedAvg(mlp(), lr=0.1, batch_size=8, engine="stacked"), Dashboard(), RunRecord(), attack)
    events = EventAccumulator(str(tmp_path / "FedAvg"))
    events.Reload()
    (tag,) = (tag for tag in events.Tags()["tensors"] if "custom_scalars" in tag)
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors(tag)[-1].tensor_proto.string_val[0])
    pages = {page.title: [chart.title for chart in page.chart] for page in layout.category}
    assert "membership: auroc" in pages["Privacy"]
    curve = json.loads((tmp_path / "FedAvg" / "run.json").read_text())["curves"]["membership/outsider/auroc"]
    assert attack.report is not None
    strongest = attack.report.strongest(view="outsider")
    assert strongest is not None
    assert curve == {"rounds": [1], "values": [pytest.approx(strongest["auroc"], abs=1e-6)]}


def test_every_chart_finds_its_numbers(board: Board) -> None:
    layout = board.get("data/plugin/custom_scalars/layout")
    for page in layout["category"]:
        for chart in page["chart"]:
            for tag in chart.get("multiline", {}).get("tag", []):
                query = "data/plugin/custom_scalars/scalars?run=WAFFLe&tag=" + quote(tag)
                found = board.get(query)
                if tag != "percent/test/global_acc$":
                    assert found["regex_valid"]
                    assert found["tag_to_events"], tag


def test_shares_are_in_percent_and_bytes_in_megabytes_beside_what_was_logged(board: Board) -> None:
    def series(tag: str) -> list[tuple[int, float]]:
        found = board.get(f"data/plugin/scalars/scalars?run=FedAvg&tag={quote(tag)}")
        return [(step, value) for _, step, value in found]

    tags = board.get("data/plugin/scalars/tags")["FedAvg"]
    pairs = [(tag, tag.partition("/")[2]) for tag in tags if tag.startswith(("percent/", "MB/"))]
    assert {"percent/test/acc", "percent/test/gap", "MB/comm/up_total"} <= {tag for tag, _ in pairs}
    for shown, logged in pairs:
        factor = 100 if shown.startswith("percent/") else 1e-6
        known = series(logged)
        assert len(known) == 2
        assert series(shown) == [(step, pytest.approx(factor * value, rel=1e-6)) for step, value in known], shown


def test_histograms_and_images(board: Board) -> None:
    histograms = board.wait("data/plugin/histograms/tags", runs=2)
    assert {"percent/clients/acc", "clients/train_loss", "clients/update_norm"} <= set(histograms["FedAvg"])
    images = board.get("data/plugin/images/tags")
    expected = {"partition", "clients/accuracy_by_round", "clients/tsne_of_updates"}
    assert set(images["FedAvg"]) == expected
    assert set(images["WAFFLe"]) == expected | {"attack/grid"}


def test_runs_can_be_sorted_by_their_last_metrics(board: Board) -> None:
    query = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS"],
        "colParams": [{"metric": {"tag": "percent/test/acc", "group": ""}, "order": "ORDER_DESC"}],
        "startIndex": 0,
        "sliceSize": 10,
    }
    groups = board.get("data/plugin/hparams/session_groups", query)["sessionGroups"]
    assert {group["hparams"]["Method"] for group in groups} == {"FedAvg", "WAFFLe"}
    assert all(group["hparams"]["lr"] == 0.1 for group in groups)
    scores = [next(m["value"] for m in g["metricValues"] if m["name"]["tag"] == "percent/test/acc") for g in groups]
    assert scores == sorted(scores, reverse=True)
    last = board.get("data/plugin/scalars/scalars?tag=percent/test/acc&run=" + groups[0]["sessions"][0]["name"])[-1][2]
    assert scores[0] == pytest.approx(last)


@pytest.mark.slow
def test_the_page_in_a_browser(board: Board, tmp_path: Path) -> None:
    screenshot(board.url + "#custom_scalars", tmp_path / "dashboard.png")
    assert colours(tmp_path / "dashboard.png") > 100


def test_training_is_not_changed(tmp_path: Path) -> None:
    plain, watched = (FedAvg(mlp(), lr=0.1, engine="stacked") for _ in range(2))
    run(tmp_path / "a", plain)
    run(tmp_path / "b", watched, Dashboard())
    assert all(torch.equal(value, weights(watched)[name]) for name, value in weights(plain).items())


def test_a_resumed_run_shows_all_rounds(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="half", enable_version_counter=False)
    run(tmp_path, FedAvg(mlp(), engine="stacked"), Dashboard(), saver, enable_checkpointing=True)
    dashboard = Dashboard(tsne=False)
    run(tmp_path, FedAvg(mlp(), engine="stacked"), dashboard, rounds=4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert dashboard.history.table()[0] == [0, 1, 2, 3]
    assert len(dashboard.sketches) == len(SIZES)


def test_methods_that_send_nothing_and_runs_without_tensorboard(tmp_path: Path) -> None:
    dashboard = Dashboard()
    run(tmp_path, Local(mlp(), engine="stacked"), dashboard)
    assert dashboard.sketches == {}
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 1, callbacks=[Dashboard()])


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_client_that_trains_a_model_for_every_agent_is_on_the_map_with_each(precision: Any, tmp_path: Path) -> None:
    dashboard = Dashboard()
    run(tmp_path, WeightErosion(mlp(), agent_of_interest="all"), dashboard, precision=precision)
    assert len(dashboard.sketches) == len(SIZES) + len(SIZES) ** 2


def test_sketches_keep_angles() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(20_000, generator=generator)
    near = base + 0.3 * torch.randn(20_000, generator=generator)
    other = torch.randn(20_000, generator=generator)
    sketched = _sketched({0: base, 1: near, 2: other}, seed=0)
    assert sketched[0].shape == (SKETCH,)
    cosine = torch.nn.functional.cosine_similarity
    exact = cosine(base, near, dim=0)
    assert float(cosine(sketched[0], sketched[1], dim=0)) == pytest.approx(float(exact), abs=0.1)
    assert abs(float(cosine(sketched[0], sketched[2], dim=0))) < 0.25


def test_other_modules_and_settings_are_refused() -> None:
    with pytest.raises(FederationError, match="images_every must be 0 or more"):
        Dashboard(images_every=-1)
    with pytest.raises(FederationError, match="needs a federated method"):
        Dashboard().setup(Trainer(logger=False), LightningModule(), "fit")


def test_other_loggers_get_settings_and_pictures(tmp_path: Path) -> None:
    class Images(Logger):
        """Takes pictures as Weights & Biases does."""

        name, version = "images", 0

        def __init__(self) -> None:
            super().__init__()
            self.taken: dict[str, Any] = {}
            self.params: dict[str, Any] = {}

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.params |= dict(params)

        def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
            self.taken[key] = images[0].shape

    images, files = Images(), CSVLogger(tmp_path)
    run(tmp_path, FedAvg(mlp(), lr=0.1, engine="stacked"), Dashboard(), logger=[images, files])
    assert images.params["method"] == "FedAvg"
    assert (images.params["net"], images.params["data"]) == ("MLP", "TensorFederation")
    assert {"partition", "clients/accuracy_by_round", "clients/tsne_of_updates"} <= images.taken.keys()
    assert all(shape[2] == 3 for shape in images.taken.values())
    folder = Path(files.log_dir)
    assert {"partition-0.png", "accuracy_by_round-2.png"} <= {path.name for path in folder.rglob("pictures/**/*.png")}
    assert "method: FedAvg" in (folder / "hparams.yaml").read_text()


def test_the_board_names_runs_by_what_differs(tmp_path: Path) -> None:
    def made(name: str, seed: int, **settings: Any) -> None:
        (tmp_path / "runs" / name).mkdir(parents=True)
        known = {"method": "FedAvg", "lr": 0.1, "seed": seed, **settings}
        record = {
            "format": 1,
            "settings": known,
            "rounds": 0,
            "seconds": 0.0,
            "steps": 0,
            "engine": None,
            "bytes": None,
        }
        more = {"parameters": 1, "curves": {}, "clients": {"rounds": [], "accuracy": []}, "groups": {}}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(record | more))

    made("a", 0)
    made("b", 1)
    made("c", 1, lr=0.5)
    made("d", 1, lr=0.5)
    (folder := tmp_path / "links").mkdir()
    names = link(find([str(tmp_path / "runs")]), folder)
    assert names[:2] == ["FedAvg (lr=0.1), seed 0", "FedAvg (lr=0.1), seed 1"]
    assert len(set(names)) == 4
    assert sorted(path.resolve().name for path in folder.iterdir()) == ["a", "b", "c", "d"]
