"""``run.json``: written at the end and on the way, the same for a resumed run, and without effect on training."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.callbacks import Dashboard, DifferentialPrivacyCallback, FairnessCallback, RunRecord, record
from fl_lightning.callbacks.record import ClientHistory, read_record, settings_of
from fl_lightning.datamodules import MNIST, FederatedDataModule, TensorFederation
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg, FedPer
from fl_lightning.optim import FedAdam
from tests.support import blobs, fit, mlp, trainer, weights


def recorded(folder: Path, rounds: int = 3, callbacks: tuple[Callback, ...] = (), **kwargs: Any) -> dict[str, Any]:
    method = FedPer(mlp(), lr=0.1, batch_size=8, engine="stacked", seed=3)
    logger = CSVLogger(folder, name="", version="")
    fit(
        method, blobs(meta={"mode": [0, 0, 0, 1]}), rounds, logger=logger, callbacks=[RunRecord(), *callbacks], **kwargs
    )
    return read_record(folder / "run.json")


def test_it_holds_settings_curves_clients_and_cost(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    settings = run["settings"]
    assert (settings["method"], settings["net"], settings["net.hidden"]) == ("FedPer", "MLP", "[16]")
    assert (settings["lr"], settings["seed"], settings["clients"], settings["rounds"]) == (0.1, 3, 4, 3)
    assert run["curves"]["test/acc"]["rounds"] == [0, 1, 2]
    assert {"train/loss", "comm/up_bytes", "test/acc_worst10"} <= run["curves"].keys()
    assert run["clients"]["rounds"] == [0, 1, 2]
    assert [len(row) for row in run["clients"]["accuracy"]] == [4, 4, 4]
    last = run["clients"]["accuracy"][-1]
    assert run["curves"]["test/acc"]["values"][-1] == pytest.approx(sum(last) / 4, abs=1e-4)
    assert run["steps"] == 3 * (5 + 4 + 5 + 2)  # ragged clients, batches of eight
    shared = 20 * 16 + 16
    assert (run["parameters"], run["bytes"]) == (shared, [3 * 4 * 8 * shared] * 2)
    assert run["groups"] == {"mode": [0, 0, 0, 1]}
    assert run["engine"] == "stacked"


def test_a_resumed_run_has_all_of_it(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole", 4)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="half", enable_version_counter=False)
    recorded(tmp_path / "half", 2, (saver,), enable_checkpointing=True)
    again = recorded(tmp_path / "again", 4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert again["curves"].keys() == whole["curves"].keys()
    for name, curve in whole["curves"].items():
        assert again["curves"][name]["rounds"] == curve["rounds"] == [0, 1, 2, 3]
        if not name.startswith("time/"):
            assert again["curves"][name]["values"] == pytest.approx(curve["values"], abs=1e-6)
    assert again["clients"] == whole["clients"]
    assert again["steps"] == whole["steps"]


def test_a_federation_of_one_client_is_recorded(tmp_path: Path) -> None:
    again, board = RunRecord(folder=str(tmp_path)), Dashboard()
    method = FedAvg(mlp(), batch_size=8, engine="sequential")
    data = blobs((16,), meta={"mode": [0]})
    fit(method, data, 2, callbacks=[again, board, FairnessCallback(folder=str(tmp_path))])
    rows = read_record(tmp_path / "run.json")["clients"]["accuracy"]
    assert [len(row) for row in rows] == [1, 1]
    assert method.evaluator.scores["test"].shape == (1,)
    assert board.history.table()[1].shape == (2, 1)


def test_a_record_and_a_dashboard_that_are_used_again_hold_the_last_run_alone(tmp_path: Path) -> None:
    again, board = RunRecord(folder=str(tmp_path)), Dashboard()
    for rounds in (3, 2):
        fit(FedAvg(mlp(), batch_size=8, engine="stacked"), blobs(), rounds, callbacks=[again, board])
    run = read_record(tmp_path / "run.json")
    assert run["curves"]["train/loss"]["rounds"] == run["clients"]["rounds"] == [0, 1]
    assert board.history.table()[0] == [0, 1]
    longer = trainer(2, callbacks=[again])
    method = FedAvg(mlp(), batch_size=8, engine="stacked")
    longer.fit(method, datamodule=blobs())
    longer.fit_loop.max_epochs = 3
    longer.fit(method, datamodule=blobs())
    assert read_record(tmp_path / "run.json")["curves"]["train/loss"]["rounds"] == [0, 1, 2]


def test_a_run_that_was_saved_after_a_validation_has_all_of_it(tmp_path: Path) -> None:
    """Where not every round is validated, Lightning saves before the round is over and does not end it again."""
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    every: dict[str, Any] = {"check_val_every_n_epoch": 2}
    private = functools.partial(DifferentialPrivacyCallback, reproducible_noise=True)
    whole = recorded(tmp_path / "whole", 5, (saver, private()), enable_checkpointing=True, **every)
    ckpt_path = str(tmp_path / "epoch=1.ckpt")
    again = recorded(tmp_path / "again", 5, (private(),), ckpt_path=ckpt_path, **every)
    assert again["curves"].keys() == whole["curves"].keys() >= {"privacy/epsilon", "train/loss"}
    for name, curve in whole["curves"].items():
        assert curve["rounds"] == again["curves"][name]["rounds"] == ([1, 3] if "test/" in name else [0, 1, 2, 3, 4])
        if not name.startswith("time/"):
            assert again["curves"][name]["values"] == pytest.approx(curve["values"], abs=1e-6)


def test_a_checkpoint_does_not_grow_with_the_curves(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    whole = recorded(tmp_path / "whole", 9, (saver,), enable_checkpointing=True)
    states = [torch.load(tmp_path / f"epoch={n}.ckpt", weights_only=True)["callbacks"]["RunRecord"] for n in (1, 7)]
    sizes = [len(json.dumps({n: v for n, v in state.items() if n != "clients"})) for state in states]
    assert abs(sizes[1] - sizes[0]) < 60
    again = recorded(tmp_path / "whole", 9, ckpt_path=str(tmp_path / "epoch=4.ckpt"))  # in the same folder
    lines = (tmp_path / "whole" / "curves.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == list(range(8))  # the last round is still open
    for name, curve in whole["curves"].items():
        assert again["curves"][name]["rounds"] == curve["rounds"]
        if not name.startswith("time/"):
            assert again["curves"][name]["values"] == curve["values"]


def settings(data: FederatedDataModule | None = None, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    module = FedAvg(mlp(), engine="stacked", **options)
    return settings_of(fit(module, data or blobs(), 1, callbacks=list(callbacks)), module)


def test_settings_tell_runs_on_other_data_and_with_other_defences_apart() -> None:
    made = [
        settings(blobs(eval_only=[0, 1])),
        settings(blobs(eval_only=[0])),
        settings(blobs(fraction=0.5)),
        settings(blobs(), DifferentialPrivacyCallback()),
        settings(blobs(), DifferentialPrivacyCallback(clip=2.0)),
        settings(),
    ]
    assert len({json.dumps(one) for one in made}) == len(made)
    assert made[0]["data.eval_only"] == "[0, 1]"
    assert made[4]["defence.DifferentialPrivacyCallback.clip"] == 2.0
    kept = {key for key in made[0] if key.startswith("data.")}
    assert {"data.fraction", "data.limit", "data.augment", "data.val_fraction"} <= kept
    assert not kept & {"data.seed", "data.root", "data.download", "data.inputs"}
    assert settings(blobs(seed=1)) == settings(blobs(seed=2))


def test_the_data_sets_own_arguments_and_saved_ones_are_settings() -> None:
    class Saved(TensorFederation):
        def __init__(self, blur: float, **kwargs: Any) -> None:
            super().__init__(torch.rand(40, 20), torch.arange(40) % 4, num_classes=4, **kwargs)
            self.save_hyperparameters()

    assert settings(Saved(0.5, seed=3))["data.blur"] == 0.5
    assert "data.seed" not in settings(Saved(0.5, seed=3))
    found = record._data_arguments(MNIST(standardize=False, limit=30, root="here", download=False))
    assert (found["standardize"], found["limit"]) == (False, 30)
    assert not found.keys() & {"root", "download"}


def test_a_server_optimizer_is_told_by_class_and_arguments() -> None:
    """The command line makes partials of a function of its own, whose text holds addresses in memory."""
    hidden = functools.partial(lambda make, kind, *args, **kwargs: kind(*args, **kwargs), object(), FedAdam, lr=0.1)
    assert settings(server_optimizer=hidden)["server_optimizer"] == "FedAdam(lr=0.1)"
    assert settings(server_optimizer=FedAdam)["server_optimizer"] == "FedAdam"


def test_settings_are_the_same_texts_in_every_process() -> None:
    found: dict[str, Any] = {}
    record._flatten(found, "", {"a": object(), "long": list(range(1000)), "other": list(range(1001))})
    assert found["a"] == "<object object>"
    assert found["long"] != found["other"]
    assert len(found["long"]) < 300


def test_a_run_that_breaks_off_leaves_what_there_is(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_round_start(self, trainer: Any, module: Any, round: int, cohort: list[int]) -> None:
            if round == 2:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        recorded(tmp_path, 3, (Breaks(),))
    assert read_record(tmp_path / "run.json")["curves"]["test/acc"]["rounds"] == [0, 1]


def test_without_a_logger_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit(FedAvg(mlp(), engine="stacked"), blobs(), 1, callbacks=[RunRecord()])
    assert list(tmp_path.rglob("run.json")) == []


def test_training_is_not_changed(tmp_path: Path) -> None:
    methods = []
    for callbacks in ([], [RunRecord(folder=str(tmp_path))]):
        methods.append(FedAvg(mlp(), lr=0.1, engine="stacked"))
        fit(methods[-1], blobs(), 2, callbacks=callbacks)
    assert all(torch.equal(value, weights(methods[1])[name]) for name, value in weights(methods[0]).items())


def test_history_is_thinned_out_evenly_and_keeps_the_last_round() -> None:
    history = ClientHistory(most=4)
    for round in range(11):
        history.add(round, torch.tensor([round / 10, float("nan")]))
    rounds, scores = history.table()
    assert rounds == [0, 4, 8, 10]
    assert scores[:, 0].tolist() == pytest.approx([0, 0.4, 0.8, 1.0])
    again = ClientHistory(most=4)
    again.load_state_dict(history.state_dict())
    assert again.table()[0] == rounds


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": 0})])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(FederationError, match="run the fit again"):
        read_record(tmp_path / "run.json")


def test_history_of_rounds_that_are_all_odd_and_resumed() -> None:
    """Validation every second round: thinned by how many there were, not by their numbers."""
    whole, part = ClientHistory(most=4), ClientHistory(most=4)
    for number in range(11):
        whole.add(2 * number + 1, torch.tensor([float(number)]))
        part.add(2 * number + 1, torch.tensor([float(number)]))
        resumed = ClientHistory(most=4)
        resumed.load_state_dict(part.state_dict())
        part = resumed
    assert whole.table()[0] == part.table()[0] == [1, 9, 17, 21]
    assert part.table()[1].flatten().tolist() == [0, 4, 8, 10]
