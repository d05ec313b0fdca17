"""The ledger: exact bytes of every method, private names fail the run, resumed as if never stopped."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from fl_lightning.callbacks import LedgerCallback
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer, LGFedAvg, Local, WAFFLe
from fl_lightning.module import FederatedModule
from fl_lightning.parties import Me, Reply
from fl_lightning.wire import State
from tests.support import blobs, fit, largest_difference, mlp, trainer, weights


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


BASE, HEAD = 20 * 16 + 16, 16 * 4 + 4
#: Scalars up and down of one message, by hand.
SCALARS: list[tuple[type[FederatedModule], dict[str, Any], int, int]] = [
    (FedAvg, {}, BASE + HEAD, BASE + HEAD),
    (FedPer, {}, BASE, BASE),
    (LGFedAvg, {}, HEAD, HEAD),
    (SCAFFOLD, {}, 2 * (BASE + HEAD), 2 * (BASE + HEAD)),
    (Local, {}, 0, 0),
    (WAFFLe, {"factors": {"fc1": 5}, "epochs": 2}, 20 * 5 + 5 * 16 + 5 + 16 + HEAD, 20 * 5 + 5 * 16 + 5 + 16 + HEAD),
]


@pytest.mark.parametrize(("kind", "options", "up", "down"), SCALARS, ids=lambda value: getattr(value, "__name__", ""))
def test_bytes_by_hand(
    kind: type[FederatedModule], options: dict[str, Any], up: int, down: int, tmp_path: Path
) -> None:
    ledger, method = LedgerCallback(folder=str(tmp_path)), kind(mlp(), engine="stacked", **options)
    run = fit(method, blobs(), 2, callbacks=[ledger])
    assert (ledger.total("up"), ledger.total("down")) == (2 * 4 * 8 * up, 2 * 4 * 8 * down)  # rounds, clients, float64
    assert (ledger.total("up"), ledger.total("down")) == (method.bytes_up, method.bytes_down)
    assert float(run.callback_metrics["ledger/up_bytes_total"]) == ledger.total("up")
    rows = list(csv.DictReader(open(tmp_path / "ledger.csv")))  # noqa: SIM115
    assert sum(int(row["bytes"]) for row in rows) == ledger.total("up") + ledger.total("down")
    assert {(row["round"], row["client"]) for row in rows} == {(str(r), str(c)) for r in range(2) for c in range(4)}
    entries = list(csv.DictReader(open(tmp_path / "ledger_layouts.csv")))  # noqa: SIM115
    named = {(row["name"], row["shape"], row["dtype"]) for row in entries}
    if kind is FedAvg:
        assert named == {
            ("fc1.weight", "16x20", "float64"),
            ("fc1.bias", "16", "float64"),
            ("head.weight", "4x16", "float64"),
            ("head.bias", "4", "float64"),
        }
    assert f"| up | 2 | 8 | {ledger.total('up')} |" in (tmp_path / "ledger.md").read_text()
    assert ledger.run_metrics()["up_bytes_per_round"] == 4 * 8 * up


class Leaky(FedPer):
    """Sends its head."""

    def leave(self, state: State, received: State, me: Me) -> Reply:
        return super().leave(state, received, me).plus(up={"head.weight": state["head.weight"]})

    def aggregate(self, messages: list[Any]) -> State:
        mean = super().aggregate(messages)
        return {name: value for name, value in mean.items() if name in self.shared_names}


class Renamed(FedAvg):
    """Keeps an entry that the net does not know, and sends it."""

    def leave(self, state: State, received: State, me: Me) -> Reply:
        secret = {"secret": torch.ones(3)}
        return super().leave(state, received, me).plus(up=secret, keep=secret)

    def aggregate(self, messages: list[Any]) -> State:
        return {name: value for name, value in super().aggregate(messages).items() if name != "secret"}


@pytest.mark.parametrize(("kind", "name"), [(Leaky, "head.weight"), (Renamed, "secret")])
def test_a_private_name_that_crosses_fails_the_run(kind: type[FederatedModule], name: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=f"contains {name}, which is private in {kind.__name__}"):
        fit(kind(mlp(), engine="stacked"), blobs(), 2, callbacks=[LedgerCallback(folder=str(tmp_path))])
    ledger = LedgerCallback(assert_private=False, folder=str(tmp_path))
    fit(kind(mlp(), engine="stacked"), blobs(), 2, callbacks=[ledger])
    assert any(entry[0] == name for layout in ledger.layouts for entry in layout)


def test_a_private_name_that_goes_down_fails_the_run() -> None:
    class Down(FedPer):
        def message_down(self, client: int) -> State:
            return self.server_state()

    with pytest.raises(FederationError, match=r"contains head\.bias, head\.weight"):
        fit(Down(mlp()), blobs(), 1, callbacks=[LedgerCallback()])


def test_resumed_and_without(tmp_path: Path) -> None:
    """A resumed run's ledger is that of one never stopped, and no ledger changes a weight."""
    whole, part = (LedgerCallback(folder=str(tmp_path / name)) for name in ("whole", "part"))
    plain = FedPer(mlp(), engine="stacked")
    method = FedPer(mlp(), engine="stacked")
    fit(method, blobs(fraction=0.5), 4, callbacks=[whole])
    fit(plain, blobs(fraction=0.5), 4)
    assert largest_difference(weights(method), weights(plain)) == 0.0
    run = fit(FedPer(mlp(), engine="stacked"), blobs(fraction=0.5), 2, callbacks=[LedgerCallback()])
    run.save_checkpoint(tmp_path / "part.ckpt")
    fit(
        FedPer(mlp(), engine="stacked"), blobs(fraction=0.5), 4, ckpt_path=str(tmp_path / "part.ckpt"), callbacks=[part]
    )
    assert part.lines == whole.lines
    assert part.layouts == whole.layouts
    for name in ("ledger.csv", "ledger_layouts.csv", "ledger.md"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_of_a_long_run_is_no_larger_and_a_resumed_run_cuts_off_what_came_after_it(tmp_path: Path) -> None:
    def run(rounds: int, **kwargs: Any) -> LedgerCallback:
        ledger = LedgerCallback(folder=str(tmp_path))
        callbacks = [ledger, *kwargs.pop("callbacks", ())]
        fit(FedPer(mlp(), engine="stacked"), blobs(fraction=0.5), rounds, callbacks=callbacks, **kwargs)
        return ledger

    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = run(12, callbacks=[saver], enable_checkpointing=True)
    sizes = [
        len(pickle.dumps(torch.load(tmp_path / f"epoch={n}.ckpt", weights_only=True)["callbacks"]["LedgerCallback"]))
        for n in (1, 11)
    ]
    assert abs(sizes[1] - sizes[0]) < 50
    files = {path.name: path.read_bytes() for path in tmp_path.glob("ledger*")}
    again = run(12, ckpt_path=str(tmp_path / "epoch=4.ckpt"))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("ledger*")} == files
    assert again.lines == whole.lines
    assert len(whole.lines) == 12 * 2 * 2


def test_lines_that_are_gone_are_missed_and_the_totals_are_not(tmp_path: Path) -> None:
    whole = LedgerCallback(folder=str(tmp_path / "whole"))
    run = fit(FedAvg(mlp(), engine="stacked"), blobs(), 2, callbacks=[whole])
    run.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "whole" / "ledger.csv").write_text("something else\n" * 99)
    part, method = LedgerCallback(folder=str(tmp_path / "part")), FedAvg(mlp(), engine="stacked")
    with pytest.warns(UserWarning, match=r"ledger\.csv differs from the checkpoint"):
        trainer(3, callbacks=[part]).fit(method, datamodule=blobs(), ckpt_path=str(tmp_path / "run.ckpt"))
    assert (part.total("up"), part.total("down")) == (method.bytes_up, method.bytes_down)
    assert {line.round for line in part.lines} == {2}


def test_what_is_no_federation_is_refused() -> None:
    with pytest.raises(FederationError, match="needs a federated method, not BoringModel"):
        trainer(callbacks=[LedgerCallback()], precision="32-true").fit(BoringModel())
