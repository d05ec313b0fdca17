"""Membership inference attacks on any classifier, learned from shadow models.

``shadow`` (Shokri et al., 2017) trains a classifier on the shadows' outputs for their members and non-members. ``loss``
(Yeom et al., 2018) takes samples of small loss as members. ``lira`` (Carlini et al., 2022) and ``rmia`` (Zarifzadeh et
al., 2024) compare with shadows sample by sample; ``lira_online`` and ``rmia_online`` also with shadows that were
trained on the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.evaluation import SAMPLES
from fl_lightning.federation import Federation
from fl_lightning.metrics import attack_auroc, best_threshold
from fl_lightning.module import FederatedModule
from fl_lightning.privacy import scores
from fl_lightning.wire import State, fast_copy

#: The attacks by name.
ATTACKS = ("shadow", "loss", "lira", "rmia", "lira_online", "rmia_online")
#: The attack classifier: hidden units, learning rate of Adam, passes, batch size.
HIDDEN, RATE, EPOCHS, BATCH = 64, 1e-3, 50, 128
#: Maximum number of its training samples.
TAUGHT = 3000


class Answers(NamedTuple):
    """Outputs of models for some samples, averaged over the models."""

    features: Tensor
    """Probabilities in descending order, that of the true class, and the loss; shape (n, classes + 2)."""
    loss: Tensor
    """Cross entropy, shape (n,)."""
    confidence: Tensor
    """Log odds of the true class, shape (n,)."""


@dataclass(frozen=True)
class MembershipResult:
    """One attack on one client.

    Args:
        scores: higher means member, members first, shape (n,).
        members: whether each sample is one, shape (n,).
        threshold: decision threshold, learned from shadows.
        shadow_auroc: AUROC on shadows, by which an attacker selects an attack.
    """

    scores: Tensor
    members: Tensor
    threshold: float
    shadow_auroc: float


@torch.no_grad()
def answers(
    module: FederatedModule, states: Sequence[State], federation: Federation, rows: Tensor, client: int | None = None
) -> Answers:
    """Query models for samples.

    Args:
        module: the method, for its net.
        states: one or more models, whose answers are averaged.
        federation: the data.
        rows: the samples, shape (n,).
        client: the client whose label permutation to use, if any.
    """
    rows = rows.to(federation.device)
    target = federation.targets[rows]
    if client is not None and federation.label_maps is not None:
        target = federation.label_maps[client][target]
    found = []
    for state in map(fast_copy, states):
        logits = [
            module.call(state, federation.features(federation.inputs[part], module.compute_dtype), training=False)[0]
            for part in torch.split(rows, SAMPLES)
        ]
        found.append(answers_of(torch.cat(logits).double(), target))
    return Answers(*(torch.stack(parts).mean(0) for parts in zip(*found, strict=True)))


def answers_of(logits: Tensor, target: Tensor) -> Answers:
    """Return the answers of one model from logits, shape (n, classes), and true classes, shape (n,)."""
    log_p = logits.log_softmax(1)
    own = log_p.gather(1, target[:, None])
    others = logits.log_softmax(1).scatter(1, target[:, None], -torch.inf).logsumexp(1)
    features = torch.cat((log_p.exp().sort(1, descending=True).values, own.exp(), -own), 1)
    return Answers(features, -own[:, 0], own[:, 0] - others)


@dataclass(frozen=True)
class Teacher:
    """Scores from M shadow models whose training samples the adversary knows; no federation is needed.

    Args:
        known: the models' answers for U samples, stacked, shapes (M, U, ...).
        inside: which model was trained on which sample, boolean, shape (M, U).
        outside: which model has not seen it at all; a model of a federation may have seen it through others.
        groups: number of the federation of each model, shape (M,); models of a group are no references for each other.
        others: each model's probabilities of the true class for samples that none has seen, shape (M, Z).
        seed: seed of the attack classifier.
        online: whether shadows are trained on attacked samples.
    """

    known: Answers
    inside: Tensor
    outside: Tensor
    groups: Tensor
    others: Tensor
    seed: int
    online: bool = False

    def __post_init__(self) -> None:
        if not len(self.groups):
            raise FederationError("Membership inference needs at least one shadow.")

    def infer(
        self,
        target: Answers,
        references: Answers,
        inside: Tensor,
        outside: Tensor,
        target_others: Tensor,
        members: Tensor,
    ) -> dict[str, MembershipResult]:
        """Carry out all attacks for which there are enough shadows.

        Args:
            target: the attacked model's answers for n samples.
            references: the shadow models' answers for them, stacked, shapes (M, n, ...).
            inside: which shadow model was trained on which of them, boolean, shape (M, n).
            outside: which has not seen it at all.
            target_others: the attacked model's probabilities for the samples of ``others``, shape (Z,).
            members: which of the n samples are members, for the result.
        """
        found = self._plain(target)
        found |= self._compared(target, references, inside, outside, self.others, target_others)
        return {
            name: MembershipResult(value, members, *self.taught[name])
            for name, value in found.items()
            if name in self.taught
        }

    @cached_property
    def taught(self) -> dict[str, tuple[float, float]]:
        """Threshold of each attack and its AUROC on shadows, each attacked with the help of the others."""
        values: dict[str, list[Tensor]] = {}
        flags: dict[str, list[Tensor]] = {}
        for model in range(len(self.groups)):
            own, rest = self.inside[model], self.outside[model]
            apart = self.groups != self.groups[model]
            plain = own | rest
            seen = plain & (self.outside & apart[:, None]).any(0)
            if self.online:
                seen &= (self.inside & apart[:, None]).any(0)
            found = [(plain, self._plain(self._known(model, plain)))]
            if bool((seen & own).any() & (seen & rest).any()):
                sides = self.inside[apart][:, seen], self.outside[apart][:, seen]
                nothing = self.known.features[:0]  # the largest part, which nothing is compared by
                theirs = Answers(nothing, *(part[apart][:, seen] for part in self.known[1:]))
                known = self._known(model, seen), theirs
                found.append((seen, self._compared(*known, *sides, self.others[apart], self.others[model])))
            for rows, scored in found:
                for name, value in scored.items():
                    values.setdefault(name, []).append(value)
                    flags.setdefault(name, []).append(own[rows])
        return {name: _line(torch.cat(values[name]), torch.cat(flags[name]), name == "shadow") for name in values}

    def _known(self, model: int, rows: Tensor) -> Answers:
        return Answers(*(part[model][rows] for part in self.known))

    def _plain(self, target: Answers) -> dict[str, Tensor]:
        """Run attacks that use only the target."""
        return {"shadow": self._by_classifier(target.features), "loss": scores.loss_scores(target.loss)}

    def _compared(
        self,
        target: Answers,
        references: Answers,
        inside: Tensor,
        outside: Tensor,
        others: Tensor,
        target_others: Tensor,
    ) -> dict[str, Tensor]:
        """Run attacks that compare with other models, if every sample has one."""
        if not len(others) or not bool(outside.any(0).all()):
            return {}
        odds, found = references.confidence, dict[str, Tensor]()
        found["lira"] = scores.lira_offline(target.confidence, odds, outside)
        chance, theirs = (-target.loss).exp(), (-references.loss).exp()
        if target_others.numel():
            found["rmia"] = scores.rmia(chance, theirs, outside, target_others, others)
        if self.online and bool(inside.any(0).all()):
            found["lira_online"] = scores.lira_online(target.confidence, odds, inside, outside)
            if target_others.numel():
                found["rmia_online"] = scores.rmia(chance, theirs, outside, target_others, others, inside)
        return found

    def _by_classifier(self, features: Tensor) -> Tensor:
        model, middle, spread = self._classifier
        with torch.no_grad():
            chances: Tensor = model(((features - middle) / spread).float()).softmax(1)[:, 1]
        return chances.double()

    @cached_property
    def _classifier(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Train the classifier on as many non-members as members of each model; return it with feature mean and std."""
        features, flags = [], []
        rng = seeding.stream(self.seed, "attack.balance")
        for model in range(len(self.groups)):
            own, rest = (mask[model].nonzero().flatten() for mask in (self.inside, self.outside))
            number = min(len(own), len(rest), max(1, TAUGHT // (2 * len(self.groups))))
            for rows, flag in ((own, 1.0), (rest, 0.0)):
                some = rows[seeding.permutation(rng, len(rows))[:number].to(rows.device)]
                features.append(self.known.features[model][some])
                flags.append(torch.full((number,), flag, device=rows.device))
        known = torch.cat(features)
        middle, spread = known.mean(0), known.std(0).clamp(min=1e-6)
        return attack_classifier((known - middle) / spread, torch.cat(flags).bool(), self.seed), middle, spread


def _line(values: Tensor, flags: Tensor, half: bool) -> tuple[float, float]:
    """Return the threshold between members and others, and the AUROC."""
    return 0.5 if half else best_threshold(values, flags), float(attack_auroc(values, flags))


def attack_classifier(features: Tensor, members: Tensor, seed: int) -> nn.Module:
    """Train the classifier of the shadow attack: an MLP with one hidden layer, by Adam.

    Args:
        features: shape (n, f).
        members: boolean, shape (n,).
        seed: seed of its weights and batches.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(features.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
        model = model.to(features.device, torch.float32)  # whatever the precision of the run
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        x, y = features.float().clone(), members.long()
        rng = seeding.stream(seed, "attack.classifier")
        for _ in range(EPOCHS):
            for part in torch.split(seeding.permutation(rng, len(x)).to(x.device), BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return model.requires_grad_(False)
