"""Property inference: global properties of a client's data, inferred from its update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.callbacks.attacks import AttackCallback
from fl_lightning.errors import FederationError
from fl_lightning.metrics import clopper_pearson, membership_intervals, membership_summary
from fl_lightning.module import FederatedModule
from fl_lightning.parties import Setting
from fl_lightning.privacy.data import attack_data
from fl_lightning.privacy.figures import roc_figure
from fl_lightning.privacy.properties import Inferred, Property, draw_clients, infer_property
from fl_lightning.privacy.rehearsal import rehearse, update
from fl_lightning.privacy.report import BASELINE, Row
from fl_lightning.privacy.wiretap import Run
from fl_lightning.ranges import Count, CountOrZero, PositiveShare, TwoOrMore
from fl_lightning.wire import State

#: Share of an acquaintance's samples in each of its shadows.
PART = 0.8
#: Client and group of rows over all clients.
_NOBODY: Row = {"client": -1, "group": ""}


class PropertyInferenceCallback(AttackCallback):
    """Infers from every attacked client's last update whether its data has a property.

    There are three kinds of properties: at least ``share`` of the samples are of class ``label``; ``holds`` is true for
    the client's labels; or the client's ``group`` in the federation's ``meta`` is ``value``. For the first two, the
    adversary samples clients with random class shares from its own data, trains ``shadows`` of either kind from the
    message that the attacked client received, and learns to classify their updates. For ``value``, it has the test
    samples of every other client of each group (its acquaintances), and attacks the rest.

    Reported over the attacked clients are ``accuracy`` at the threshold learned from the shadows, ``auroc``, their 95%
    intervals, and ``shadow_auroc``, by which the strongest of ``discriminant`` and ``ridge`` is selected; and the
    baseline ``majority``, which always gives the more frequent answer. The outsider can compare an up message only with
    the common initial weights, so it succeeds in the first round only.

    With a TensorBoard logger, the ROC curves are logged as the image ``property/<view>``. All raw scores are saved as
    ``property.pt`` in the log folder.

    Args:
        views: the adversaries, of ``outsider``, ``server`` and ``colluding``.
        label: the class.
        share: minimum share of the class; None means the median over clients, or at least one sample if that is 0.
        holds: the property as a function of a client's labels, instead of ``label``.
        value: a group of ``meta``, instead of ``label``.
        shadows: number of simulated clients with the property, and of those without it.
        samples: maximum number of rows of a simulated client.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        group: name in the federation's ``meta`` of ``value``, by which the report also groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "property"
    metric_prefix = "property"
    by = "auroc"
    pick = "shadow_auroc"
    allowed = ("outsider", "server", "colluding")
    reason = "it sees no update of a single client"

    def __init__(
        self,
        views: Sequence[str] = ("server",),
        label: CountOrZero = 0,
        share: PositiveShare | None = None,
        holds: Property | None = None,
        value: str | None = None,
        shadows: TwoOrMore = 30,
        samples: Count = 1000,
        clients: Count | None = None,
        every: Count | None = None,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, 1, group, folder)
        if holds is not None and value is not None:
            raise FederationError("A property is either holds or value: leave one of them out.")
        self.label, self.share, self.holds, self.value = label, share, holds, value
        self.shadows, self.samples = shadows, samples
        #: Raw scores of the last attack.
        self.scored: list[dict[str, Any]] = []
        self._asked = ""

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Train classifiers on the shadows' updates, and attack."""
        truth, rows = self._question(run.module, run.clients)
        clients = [client for client in run.clients if client in truth]
        has = torch.tensor([truth[client] for client in clients])
        if not bool(has.any()) or bool(has.all()):
            raise FederationError(
                f"{int(has.sum())} of {len(has)} attacked clients have the property ({self._asked}), so there is "
                "nothing to infer: choose another property, or attack more clients."
            )
        self.scored, table = [], list[Row]()
        for view in run.each(self.views):
            found = self._inferred(run, view.name, clients, rows)
            for variant, one in found.items():
                how = {"view": view.name, "assumption": "seen", "variant": variant}
                table.append({**how, **_NOBODY, **_measures(one, has)})
                self.scored.append({**how, "clients": clients, "scores": one.scores, "has": has})
        if table:
            likelier = max(int(has.sum()), len(has) - int(has.sum()))
            scores = dict.fromkeys((name for name in table[0] if isinstance(table[0][name], float)), float("nan"))
            low, high = clopper_pearson(likelier, len(has))
            scores |= {"accuracy": likelier / len(has), "accuracy_low": low, "accuracy_high": high, "auroc": 0.5}
            table.append({**_NOBODY, "view": BASELINE, "assumption": "", "variant": "majority", **scores})
        self._show(trainer, run.module.completed_rounds)
        return table

    def notes(self) -> dict[str, Any]:
        """Return the property and the numbers of clients."""
        has = self.scored[0]["has"] if self.scored else torch.zeros(0)
        return {
            "property": self._asked,
            "clients asked about, and those that have it": f"{len(has)}, {int(has.sum())}",
            "shadows of either kind": self.shadows,
        }

    def _question(self, module: FederatedModule, clients: Sequence[int]) -> tuple[dict[int, bool], list[list[Tensor]]]:
        """Return which clients have the property, and rows of the adversary's clients with and without it."""
        federation = module.federation
        rng = seeding.stream(module.seed, "attack.properties")
        if self.value is not None:
            return self._acquainted(module, rng)
        labels = {client: federation.targets[federation.train[client]].cpu() for client in clients}
        holds, self._asked = self.holds, "as given"
        if holds is None:
            shares = {client: float((own == self.label).double().mean()) for client, own in labels.items()}
            median = sorted(shares.values())[len(shares) // 2]
            some = min((share for share in shares.values() if share > 0), default=1.0)
            least = self.share if self.share is not None else max(median, some)
            self._asked = f"at least {least:.3g} of the samples are of class {self.label}"
            holds = partial(_has_share, label=self.label, share=least)
        pool = attack_data(federation, [], module.seed).pool
        size = min(self.samples, int(federation.train.sizes.median()), max(1, len(pool) // 2))
        drawn = draw_clients(
            federation.targets[pool.to(federation.device)], federation.num_classes, holds, self.shadows, size, rng
        )
        truth = {client: bool(holds(own)) for client, own in labels.items()}
        return truth, [[pool[places] for places in side] for side in drawn]

    def _acquainted(self, module: FederatedModule, rng: Any) -> tuple[dict[int, bool], list[list[Tensor]]]:
        """Do the same for a group of clients; every other client of a group is an acquaintance."""
        federation = module.federation
        values = [str(value) for value in federation.meta.get(self.group, ())]
        if self.value not in values:
            there = ", ".join(sorted(set(values))) or "none"
            raise FederationError(f"No group of clients by {self.group!r} is {self.value!r}: there are {there}.")
        self._asked = f"{self.group} is {self.value}"
        wanted = torch.tensor([value == self.value for value in values])
        sides: list[list[int]] = [torch.nonzero(side).flatten().tolist() for side in (wanted, ~wanted)]
        known = [side[::2] for side in sides]
        drawn: list[list[Tensor]] = []
        for acquainted in known:
            rows = [federation.test[client].cpu() for client in acquainted if len(federation.test[client]) > 1]
            if not rows:
                raise FederationError("The adversary's acquaintances have no test samples to train shadows on.")
            every = [rows[number % len(rows)] for number in range(self.shadows)]
            drawn.append([own[seeding.permutation(rng, len(own))[: max(1, int(PART * len(own)))]] for own in every])
        return {client: bool(wanted[client]) for clients in sides for client in clients[1::2]}, drawn

    def _inferred(self, run: Run, view: str, clients: list[int], rows: list[list[Tensor]]) -> dict[str, Inferred]:
        """Classify all clients; shadows are trained for every distinct received model."""
        module, seen = run.module, [self._seen(run, view, client) for client in clients]
        answers: dict[str, list[tuple[list[int], Inferred]]] = {}
        if any(one is None for one in seen):
            return {}
        pairs = [one for one in seen if one is not None]
        for places in _alike([received for received, _ in pairs]):
            received = pairs[places[0]][0]
            setting = module.setting()
            setting = Setting(max(0, setting.round - 1), setting.rounds, clients=setting.clients)
            sent = rehearse(module, module.federation, received, rows[0] + rows[1], setting, "attack.property")
            known = torch.stack([update(module, received, message) for message in sent])
            targets = torch.stack([update(module, received, pairs[place][1]) for place in places])
            for name, one in infer_property(known[: len(rows[0])], known[len(rows[0]) :], targets, module.seed).items():
                answers.setdefault(name, []).append((places, one))
        found = {}
        for name, parts in answers.items():
            scores = torch.empty(len(clients), dtype=torch.float64)
            for places, one in parts:  # thresholds differ between models, so shift each to 0
                scores[torch.tensor(places)] = (one.scores - one.line).cpu()
            found[name] = Inferred(scores, 0.0, sum(one.shadow_auroc for _, one in parts) / len(parts))
        return found

    def _seen(self, run: Run, view: str, client: int) -> tuple[State, State] | None:
        """Return a client's last exchange as seen by a view; None if it sees none."""
        if view == "colluding":
            left, handed = run.wire.left.get(client), run.wire.received.get(client)
            return (handed[-1], left[-1]) if left and handed and handed[-1] else None
        exchanged = run.wire.exchanged(client)
        if not exchanged:
            return None
        received, sent = exchanged[-1]
        if view == "outsider":
            if self._initial is None or not self._began:
                return None
            state = self._initial.server_state()
            received = {**received, **{n: v.to(received[n]) for n, v in state.items() if n in received}}
        return received, sent

    def _show(self, trainer: Trainer, rounds: int) -> None:
        for view in dict.fromkeys(one["view"] for one in self.scored):
            curves = {one["variant"]: (one["scores"], one["has"]) for one in self.scored if one["view"] == view}
            self.picture(trainer, f"property/{view}", partial(roc_figure, curves, found="clients found"), rounds)
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(self.scored, Path(folder) / "property.pt")


def _has_share(labels: Tensor, label: int, share: float) -> bool:
    return bool((labels == label).double().mean() >= share - 1e-9)


def _measures(one: Inferred, has: Tensor) -> dict[str, float]:
    summary = membership_summary(one.scores, has, one.line)
    kept = {name: float(summary[name]) for name in ("accuracy", "auroc", "best_accuracy")}
    low, high = clopper_pearson(round(kept["accuracy"] * len(has)), len(has))
    ends = membership_intervals(one.scores, has)
    auroc = {name: ends[name] for name in ("auroc_low", "auroc_high")}
    return {**kept, "accuracy_low": low, "accuracy_high": high, **auroc, "shadow_auroc": one.shadow_auroc}


def _alike(received: Sequence[State]) -> list[list[int]]:
    """Group the indices of equal messages."""
    found: list[list[int]] = []
    for place, one in enumerate(received):
        for places in found:
            known = received[places[0]]
            if known.keys() == one.keys() and all(torch.equal(value, one[name]) for name, value in known.items()):
                places.append(place)
                break
        else:
            found.append([place])
    return found
