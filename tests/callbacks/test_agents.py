"""AgentWeightsCallback: what it logs and draws, and whom it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning.callbacks import AgentWeightsCallback
from fl_lightning.callbacks.agents import local_since, picture
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, WAFFLEAvg, WeightErosion
from tests.support import blobs, fit, mlp


def waffle(**kwargs: Any) -> WAFFLEAvg:
    return WAFFLEAvg(mlp(), **{"lr": 0.1, "batch_size": 8, "engine": "stacked", **kwargs})


@pytest.mark.parametrize(
    ("own", "since"), [([1, 1], 1), ([0.5, 1, 1], 2), ([1, 0.5, 1], 3), ([0.5, 0.9], None), ([], None)]
)
def test_local_since(own: list[float], since: int | None) -> None:
    weights = torch.tensor([[1 - w, w] for w in own]).reshape(-1, 2)
    assert local_since(weights, 1) == since


def test_scalars_and_pictures_in_tensorboard(tmp_path: Path) -> None:
    method, logger = waffle(agent_of_interest=2, local_from=0.4), TensorBoardLogger(tmp_path)
    fit(method, blobs(), rounds=5, logger=logger, callbacks=[AgentWeightsCallback(every=2)], log_every_n_steps=1)
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0}).Reload()
    history, distances = method.weight_history()[:, 0], method.distance_history()[:, 0]
    for client in range(4):
        logged = [event.value for event in events.Scalars(f"agents/weight/{client}")]
        assert logged == pytest.approx(history[:, client].tolist(), abs=1e-6)
        logged = [event.value for event in events.Scalars(f"agents/distance/{client}")]
        assert logged == pytest.approx([d for d in distances[:, client].tolist() if d == d], rel=1e-5)
    own = [event.value for event in events.Scalars("agents/own_weight")]
    assert own == pytest.approx(history[:, 2].tolist(), abs=1e-6)
    assert [event.value for event in events.Scalars("agents/local_since")] == [4, 4]  # raw from round 2, smoothed 4
    assert [image.step for image in events.Images("agents/weights")] == [1, 3, 5]
    assert (Path(logger.log_dir) / "agent_weights.png").stat().st_size > 5000


def test_all_agents_are_means_and_panels(tmp_path: Path) -> None:
    method = WeightErosion(mlp(), agent_of_interest="all", distance_penalty=0.2, lr=0.1, engine="stacked")
    run = fit(method, blobs(), rounds=3, callbacks=[AgentWeightsCallback(folder=str(tmp_path / "here"))])
    own = method.weight_history()[-1].diagonal()
    assert float(run.callback_metrics["agents/own_weight"]) == pytest.approx(float(own.mean()))
    assert not any("weight/" in name for name in run.callback_metrics)
    assert (tmp_path / "here" / "agent_weights.png").exists()
    drawn = picture(method.weight_history(), method.agents)
    assert [axes.get_title() for axes in drawn.axes[:4]] == [f"agent {i}" for i in range(4)]
    for client, line in enumerate(drawn.axes[1].lines):
        assert line.get_ydata().tolist() == method.weight_history()[:, 1, client].tolist()
        assert (line.get_linewidth() > 2) == (client == 1)


def test_methods_without_weights_and_bad_settings_are_refused() -> None:
    with pytest.raises(FederationError, match="an agent of interest, such as WAFFLEAvg, not FedAvg"):
        fit(FedAvg(mlp()), blobs(), callbacks=[AgentWeightsCallback()])
    with pytest.raises(FederationError, match="every must be 0 or more"):
        AgentWeightsCallback(every=-1)
