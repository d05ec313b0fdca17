"""Membership inference against the clients of a run, under every view and with every assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.federation import Federation
from fl_lightning.metrics import membership_intervals, membership_summary
from fl_lightning.privacy.data import AttackData, as_clients
from fl_lightning.privacy.inference import Answers, MembershipResult, Teacher, answers
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.shadows import Shadow
from fl_lightning.privacy.views import Candidates, View
from fl_lightning.privacy.wiretap import Run
from fl_lightning.wire import State

#: Maximum numbers of queried models of a shadow federation and of samples.
MODELS, ASKED = 10, 4000


@dataclass(frozen=True)
class Scored:
    """The raw scores of one attack on one client.

    Args:
        client: the client.
        how: view, assumption and variant.
        result: scores and members.
    """

    client: int
    how: dict[str, str]
    result: MembershipResult


def infer_membership(
    run: Run,
    shadows: Sequence[Shadow],
    data: AttackData,
    views: Sequence[View],
    groups: Mapping[int, str] | None = None,
    online: bool = False,
) -> tuple[list[Row], list[Scored]]:
    """Attack every client of ``data`` with a recorded message; the cost is linear in the number of shadows.

    Args:
        run: the attacked run.
        shadows: clients of shadow federations.
        data: members, non-members and the adversary's rows.
        views: the adversaries.
        groups: the clients' groups, for the report.
        online: whether half of the shadows were trained on each attacked sample.

    Returns:
        One row per client, view, assumption and attack, with the scores of
        :func:`~fl_lightning.metrics.membership_summary` as fractions, their intervals, and ``shadow_auroc``, the
        strength on shadows; and the raw scores.
    """
    federation = run.module.federation
    reference = as_clients(federation, [data.reference]) if len(data.reference) else None
    clients = [client for client in data.members if client in run.wire.sent]
    rows: list[Row] = []
    raw: list[Scored] = []
    taught: dict[tuple[str, str], _Lesson] = {}
    seen: dict[str, list[tuple[Shadow, Candidates]]] = {}
    for view, client in run.each([(view, client) for view in views for client in clients]):
        if view.name not in seen:
            chosen = _as_viewed(shadows, view, online)
            seen[view.name] = [(one, view.observe(one.run, one.client, reference)) for one in chosen]
        for assumption, states in view.observe(run, client, reference).items():
            key = (view.name, assumption)
            if key not in taught:
                models = [(one, found[assumption]) for one, found in seen[view.name] if assumption in found]
                taught[key] = _Lesson(models, data, federation, run.module.seed, online)
            for variant, result in taught[key].attack(run, client, states).items():
                how = {"view": view.name, "assumption": assumption, "variant": variant}
                summary = membership_summary(result.scores, result.members, result.threshold)
                found = {score: float(value) for score, value in summary.items()}
                found |= membership_intervals(result.scores, result.members)
                found["shadow_auroc"] = result.shadow_auroc
                rows.append({**how, "client": client, "group": (groups or {}).get(client, ""), **found})
                raw.append(Scored(client, how, result))
    return rows, raw


def _as_viewed(shadows: Sequence[Shadow], view: View, online: bool) -> list[Shadow]:
    """Return the shadow models of a view: those of clients, or one global model per federation."""
    found: list[Shadow] = []
    for _, group in groupby(shadows, lambda one: one.group):
        clients = list(group)
        if view.whole:
            found.append(clients[0]._replace(inside=clients[0].touched))
        else:
            found += clients if online else clients[:MODELS]
    return found


class _Lesson:
    """Knowledge from shadows under one view and assumption."""

    def __init__(
        self,
        models: Sequence[tuple[Shadow, list[State]]],
        data: AttackData,
        federation: Federation,
        seed: int,
        online: bool,
    ) -> None:
        self.models, self.data, self.federation = models, data, federation
        universe = torch.unique(torch.cat([data.pool, *(one.touched for one, _ in models)]))
        order = seeding.permutation(seeding.stream(seed, "attack.asked"), len(universe))[:ASKED]
        asked = universe[order.sort().values]
        inside, outside = self._seen(asked)
        others = self._ask(data.reference).loss.neg().exp() if len(data.reference) else self._ask(asked[:0]).loss
        self.teacher = Teacher(
            self._ask(asked),
            inside,
            outside,
            torch.tensor([one.group for one, _ in models], device=inside.device),
            others,
            int(seeding.stream(seed, "attack.classifier").integers(2**31)),
            online,
        )

    def attack(self, run: Run, client: int, states: list[State]) -> dict[str, MembershipResult]:
        """Carry out all attacks on one client with one candidate."""
        rows = torch.cat((self.data.members[client], self.data.nonmembers[client]))
        members = torch.arange(len(rows), device=self.federation.device) < len(self.data.members[client])
        target = answers(run.module, states, self.federation, rows, client)
        others = target.loss[:0]
        if len(self.data.reference):
            others = answers(run.module, states, self.federation, self.data.reference).loss.neg().exp()
        return self.teacher.infer(target, self._ask(rows, client), *self._seen(rows), others, members)

    def _ask(self, rows: Tensor, client: int | None = None) -> Answers:
        """Return all models' answers, stacked."""
        found = [answers(one.run.module, states, self.federation, rows, client) for one, states in self.models]
        return Answers(*(torch.stack(parts) for parts in zip(*found, strict=True)))

    def _seen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which models were trained on each row, and which have not seen it at all."""
        device = self.federation.device
        inside = torch.stack([torch.isin(rows, one.inside) for one, _ in self.models]).to(device)
        touched = torch.stack([torch.isin(rows, one.touched) for one, _ in self.models]).to(device)
        return inside, ~touched
