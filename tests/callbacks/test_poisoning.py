"""Hostile clients: by hand, by the seed, and what they do to runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import norm

from fl_lightning.callbacks import (
    BackdoorCallback,
    FederatedCallback,
    LabelFlipCallback,
    UpdatePoisoningCallback,
)
from fl_lightning.errors import FederationError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedPer
from fl_lightning.privacy.defence import change
from fl_lightning.privacy.hostile import hostile_clients, little, little_factor, min_max, stamped
from tests.support import CLASSES, blobs, fit, largest_difference, mlp, weights


class Watch(FederatedCallback):
    """Keeps the updates of the first round as the server gets them."""

    def __init__(self) -> None:
        self.received: dict[int, Any] = {}
        self.updates: dict[int, torch.Tensor] = {}

    def on_client_start(self, trainer: Any, pl_module: Any, client: int, message: Any) -> None:
        self.received[client] = {name: value.clone() for name, value in message.items()}

    def on_before_aggregate(self, trainer: Any, pl_module: Any, messages: Any) -> None:
        for m in messages:
            moved = change(m.tensors, self.received[m.client])
            self.updates.setdefault(m.client, torch.cat([value.flatten() for value in moved.values()]))


def updates(*poison: Any, kind: Any = FedAvg, rounds: int = 1) -> dict[int, torch.Tensor]:
    watch = Watch()
    fit(kind(mlp(), lr=0.1, engine="stacked"), blobs((16,) * 10), rounds, callbacks=[*poison, watch])
    return watch.updates


def test_who_is_hostile_follows_from_the_seed_alone() -> None:
    assert hostile_clients(3, 100, 0.2) == hostile_clients(3, 100, 0.2)
    assert hostile_clients(3, 100, 0.2) != hostile_clients(4, 100, 0.2)
    assert len(set(hostile_clients(3, 100, 0.2))) == 20
    assert set(hostile_clients(3, 100, 0.1)) < set(hostile_clients(3, 100, 0.2))
    assert len(hostile_clients(0, 10, 0.01)) == 1


@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD])
def test_single_poisons_by_hand(kind: Any) -> None:
    plain = updates(kind=kind)
    for poison, factor in (("sign_flip", -3.0), ("scale", 3.0)):
        attack = UpdatePoisoningCallback(poison, 3.0, share=0.2)  # type: ignore[arg-type]
        found = updates(attack, kind=kind)
        assert len(attack.hostile) == 2
        for client, update in found.items():
            expected = factor * plain[client] if client in attack.hostile else plain[client]
            torch.testing.assert_close(update, expected, rtol=1e-9, atol=1e-12)
    attack = UpdatePoisoningCallback("gaussian", 2.0, share=0.1)
    (client,) = hostile_clients(0, 10, 0.1)
    found = updates(attack, kind=kind)[client]
    assert float(found.std()) == pytest.approx(2 * float(plain[client].norm()) / len(found) ** 0.5, rel=0.15)
    rider = updates(UpdatePoisoningCallback("free_rider", share=0.1), kind=kind)[client]
    assert float(rider.abs().max()) < 1e-12


def test_a_little_is_enough_by_hand() -> None:
    """Of 50 clients 24 are hostile: 2 of the 26 honest ones have to lie further out."""
    assert little_factor(24, 50) == pytest.approx(norm.ppf(24 / 26))
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).double()
    torch.testing.assert_close(little(rows, 24, 50), torch.tensor([2.0 - norm.ppf(24 / 26), 0.0]).double())


def test_min_max_goes_as_far_as_two_are_apart() -> None:
    """-1 and 1 are 2 apart and their standard deviation is 1: the furthest from 1 that is allowed is -1."""
    found = min_max(torch.tensor([[-1.0], [1.0]]).double())
    assert float(found) == pytest.approx(-1.0, abs=1e-6)
    rows = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).double()
    most = torch.cdist(rows, rows).max()
    assert float((rows - min_max(rows)).norm(dim=1).max()) == pytest.approx(float(most), rel=1e-6)
    assert min_max(torch.ones(3, 2).double()).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["little", "min_max"])
def test_hostile_clients_that_agree_send_the_same(kind: Any) -> None:
    attack = UpdatePoisoningCallback(kind, share=0.3)
    found, plain = updates(attack), updates()
    first, *rest = (found[client] for client in attack.hostile)
    for other in rest:
        torch.testing.assert_close(first, other)
    rows = torch.stack([plain[client] for client in range(10)])
    torch.testing.assert_close(first, min_max(rows) if kind == "min_max" else little(rows, 3, 10))
    own = updates(UpdatePoisoningCallback(kind, share=0.3, omniscient=False))
    assert float((own[attack.hostile[0]] - first).abs().max()) > 1e-6


def test_start_and_the_weights_of_a_run_without_it() -> None:
    def run(*callbacks: Any) -> Any:
        method = FedAvg(mlp(), lr=0.1, engine="stacked")
        fit(method, blobs(), 2, callbacks=list(callbacks))
        return weights(method)

    assert largest_difference(run(), run(UpdatePoisoningCallback("scale", 10.0, start=2))) == 0.0
    assert largest_difference(run(), run(UpdatePoisoningCallback("scale", 10.0, start=1))) > 1e-3


def test_flipped_labels_and_the_data_afterwards() -> None:
    data, flip = blobs((16,) * 4), LabelFlipCallback(share=0.5)
    before = data.federation
    seen: dict[int, list[int]] = {}

    class Look(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int, cohort: list[int]) -> None:
            for client in range(4):
                seen[client] = pl_module.federation.targets[pl_module.federation.train[client]].tolist()

    fit(FedAvg(mlp(), lr=0.1, engine="stacked"), data, 1, callbacks=[flip, Look()])
    for client in range(4):
        own = before.targets[before.train[client]].tolist()
        assert seen[client] == ([CLASSES - 1 - y for y in own] if client in flip.hostile else own)
    assert data.federation is before


@pytest.mark.parametrize("kind", [FedAvg, FedPer])
def test_a_backdoor_opens(kind: Any) -> None:
    """With half of the clients hostile the trigger decides, without any it does nothing, and clean accuracy stays."""
    options: dict[str, Any] = {"lr": 0.2, "epochs": 5, "engine": "stacked"}
    door = BackdoorCallback(label=1, value=8.0, size=2, share=0.5)
    attacked = fit(kind(mlp(), **options), blobs((40,) * 6), 5, callbacks=[door])
    idle = BackdoorCallback(label=1, value=8.0, size=2, share=0.5)
    idle.poison = lambda federation, rows, client, seed: (federation.inputs[rows], federation.targets[rows])  # type: ignore[method-assign]
    plain = fit(kind(mlp(), **options), blobs((40,) * 6), 5, callbacks=[idle])
    assert door.success[5] > idle.success[5] + (0.5 if kind is FedAvg else 0.1)
    assert float(attacked.callback_metrics["backdoor/success"]) == pytest.approx(door.success[5])
    assert door.run_metrics()["backdoor_success"] == pytest.approx(100 * door.success[5])
    accuracy = [float(run.callback_metrics["test/acc"]) for run in (attacked, plain)]
    assert abs(accuracy[0] - accuracy[1]) < 0.15


def test_triggers() -> None:
    marked = stamped(torch.zeros(2, 1, 5, 5, dtype=torch.uint8), 255, 2)
    assert int((marked == 255).sum()) == 2 * 4
    assert bool((marked[:, :, 3:, 3:] == 255).all())


def test_bad_settings_are_refused() -> None:
    for attempt, sentence in (
        (lambda: UpdatePoisoningCallback("worst"), "kind must be sign_flip"),  # type: ignore[arg-type]
        (lambda: UpdatePoisoningCallback(share=0.0), "share must be greater than 0"),
        (lambda: UpdatePoisoningCallback(start=-1), "start must be 0 or more"),
        (lambda: BackdoorCallback(poisoned=2.0), "poisoned must be greater than 0"),
        (lambda: little_factor(5, 5), "needs an honest client"),
    ):
        with pytest.raises(FederationError, match=sentence):
            attempt()
