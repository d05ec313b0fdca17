"""Membership inference against the clients of a run, under every view and with every assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.federation import Federation
from fl_lightning.metrics import membership_summary
from fl_lightning.privacy.data import AttackData, as_clients
from fl_lightning.privacy.inference import Answers, Teacher, answers
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.views import Candidates, View
from fl_lightning.privacy.wiretap import Run
from fl_lightning.wire import State

#: A shadow: the run that it is a client of, and its number there.
Shadow = tuple[Run, int]


def infer_membership(
    run: Run,
    shadows: Sequence[Shadow],
    data: AttackData,
    views: Sequence[View],
    groups: Mapping[int, str] | None = None,
) -> list[Row]:
    """Attack every client of ``data`` of which a message was seen.

    Args:
        run: the run that is attacked.
        shadows: one for each pair of rows in ``data.shadows``, trained on the first of the pair.
        data: members, non-members and the adversary's rows.
        views: the adversaries.
        groups: the clients' groups, for the report.

    Returns:
        One row per client, view, assumption and attack, with the scores of
        :func:`~fl_lightning.metrics.membership_summary` as fractions.
    """
    federation = run.module.federation
    reference = as_clients(federation, [data.reference]) if len(data.reference) else None
    clients = [client for client in data.members if client in run.wire.sent]
    rows: list[Row] = []
    seen: dict[str, list[Candidates]] = {}
    taught: dict[tuple[str, str], tuple[Teacher, list[list[State]]]] = {}
    for view, client in run.each([(view, client) for view in views for client in clients]):
        if view.name not in seen:
            seen[view.name] = [view.observe(shadow, number, reference) for shadow, number in shadows]
        for assumption, states in view.observe(run, client, reference).items():
            key = (view.name, assumption)
            if key not in taught:
                taught[key] = _teach(shadows, seen[view.name], assumption, data, federation, run.module.seed)
            teacher, models = taught[key]
            for variant, scores in _attack(run, client, states, shadows, models, teacher, data).items():
                how = {"view": view.name, "assumption": assumption, "variant": variant}
                rows.append({**how, "client": client, "group": (groups or {}).get(client, ""), **scores})
    return rows


def _teach(
    shadows: Sequence[Shadow],
    seen: Sequence[Candidates],
    assumption: str,
    data: AttackData,
    federation: Federation,
    seed: int,
) -> tuple[Teacher, list[list[State]]]:
    """What the shadows teach under one assumption, and their models."""
    models = [candidates[assumption] for candidates in seen]

    def ask(shadow: int, rows: Tensor) -> Answers:
        return answers(shadows[shadow][0].module, models[shadow], federation, rows)

    numbers = range(len(shadows))
    crossed = [[ask(j, torch.cat(data.shadows[i])) for j in numbers] for i in numbers]
    sizes = [len(inside) for inside, _ in data.shadows]
    inside = [Answers(*(part[: sizes[i]] for part in crossed[i][i])) for i in numbers]
    outside = [Answers(*(part[sizes[i] :] for part in crossed[i][i])) for i in numbers]
    classifier = int(seeding.stream(seed, "attack.classifier").integers(2**31))
    return Teacher(inside, outside, crossed, classifier), models


def _attack(
    run: Run,
    client: int,
    states: list[State],
    shadows: Sequence[Shadow],
    models: list[list[State]],
    teacher: Teacher,
    data: AttackData,
) -> dict[str, dict[str, float]]:
    """All attacks on one client with one candidate."""
    federation = run.module.federation
    rows = torch.cat((data.members[client], data.nonmembers[client]))
    members = torch.arange(len(rows), device=federation.device) < len(data.members[client])
    target = answers(run.module, states, federation, rows, client)
    references = [
        answers(shadow.module, model, federation, rows, client)
        for (shadow, _), model in zip(shadows, models, strict=True)
    ]
    found = {}
    for name, result in teacher.infer(target, references, members).items():
        summary = membership_summary(result.scores, result.members, result.threshold)
        found[name] = {score: float(value) for score, value in summary.items()}
    return found
