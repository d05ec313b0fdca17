"""Was this sample in the client's training data? Three attacks on a model, taught by shadows.

``shadow`` (Shokri et al., 2017) trains a classifier on what shadows answer for samples they were and were not trained
on. ``loss`` (Yeom et al., 2018) calls samples of small loss members. ``lira`` (Carlini et al., 2022, offline, with a
variance common to all samples) asks how much more confident the model is than the shadows, none of which saw it.
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
from fl_lightning.metrics import best_threshold
from fl_lightning.module import FederatedModule
from fl_lightning.wire import State, fast_copy

#: The attacks by name.
ATTACKS = ("shadow", "loss", "lira")
#: The attack classifier: hidden units, learning rate of Adam, passes, batch size.
HIDDEN, RATE, EPOCHS, BATCH = 64, 1e-3, 50, 128


class Answers(NamedTuple):
    """What models answer for some samples, averaged over the models."""

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
        threshold: where the attacker draws the line, learned from shadows.
    """

    scores: Tensor
    members: Tensor
    threshold: float


@torch.no_grad()
def answers(
    module: FederatedModule, states: Sequence[State], federation: Federation, rows: Tensor, client: int | None = None
) -> Answers:
    """Ask models about samples.

    Args:
        module: the method, for its net.
        states: one or more models, whose answers are averaged.
        federation: the data.
        rows: the samples, shape (n,).
        client: whose labels hold, where clients have labellings of their own.
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
        found.append(_answers(torch.cat(logits).double(), target))
    return Answers(*(torch.stack(parts).mean(0) for parts in zip(*found, strict=True)))


def _answers(logits: Tensor, target: Tensor) -> Answers:
    log_p = logits.log_softmax(1)
    own = log_p.gather(1, target[:, None])
    others = logits.log_softmax(1).scatter(1, target[:, None], -torch.inf).logsumexp(1)
    features = torch.cat((log_p.exp().sort(1, descending=True).values, own.exp(), -own), 1)
    return Answers(features, -own[:, 0], own[:, 0] - others)


@dataclass(frozen=True)
class Teacher:
    """What an adversary learned from its shadows for one view and assumption.

    Args:
        inside: each shadow's answers for the samples it was trained on.
        outside: each shadow's answers for as many others.
        crossed: ``crossed[i][j]`` are shadow j's answers for the samples of shadow i, inside before outside.
        seed: of the attack classifier.
    """

    inside: Sequence[Answers]
    outside: Sequence[Answers]
    crossed: Sequence[Sequence[Answers]]
    seed: int

    def __post_init__(self) -> None:
        if not self.inside:
            raise FederationError("Membership inference needs at least one shadow.")

    @property
    def members(self) -> Tensor:
        """Which of all shadows' samples, shadow after shadow, were trained on."""
        flags = [torch.full_like(part.loss, i == 0) for pair in self._pairs for i, part in enumerate(pair)]
        return torch.cat(flags).bool()

    @property
    def _pairs(self) -> list[tuple[Answers, Answers]]:
        return list(zip(self.inside, self.outside, strict=True))

    def infer(self, target: Answers, references: Sequence[Answers], members: Tensor) -> dict[str, MembershipResult]:
        """Carry out all attacks that the shadows are enough for.

        Args:
            target: the attacked model's answers.
            references: each shadow's answers for the same samples.
            members: which of the samples are members, for the result.
        """
        found = {"shadow": self._by_classifier(target), "loss": self._by_loss(target)}
        if len(self.inside) > 1:
            found["lira"] = self._by_confidence(target, references)
        return {name: MembershipResult(scores, members, line) for name, (scores, line) in found.items()}

    def _by_loss(self, target: Answers) -> tuple[Tensor, float]:
        known = torch.cat([-part.loss for pair in self._pairs for part in pair])
        return -target.loss, best_threshold(known, self.members)

    def _by_confidence(self, target: Answers, references: Sequence[Answers]) -> tuple[Tensor, float]:
        known = []
        for i, (inside, outside) in enumerate(self._pairs):
            own = torch.cat((inside.confidence, outside.confidence))
            rest = [a.confidence for j, a in enumerate(self.crossed[i]) if j != i]
            known.append(own - torch.stack(rest).mean(0))
        scores = target.confidence - torch.stack([a.confidence for a in references]).mean(0)
        return scores, best_threshold(torch.cat(known), self.members)

    def _by_classifier(self, target: Answers) -> tuple[Tensor, float]:
        model, middle, spread = self._classifier
        with torch.no_grad():
            scores = model(((target.features - middle) / spread).float()).softmax(1)[:, 1]
        return scores.double(), 0.5

    @cached_property
    def _classifier(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The trained classifier, and mean and spread of the features."""
        known = torch.cat([part.features for pair in self._pairs for part in pair])
        middle, spread = known.mean(0), known.std(0).clamp(min=1e-6)
        return attack_classifier((known - middle) / spread, self.members, self.seed), middle, spread


def attack_classifier(features: Tensor, members: Tensor, seed: int) -> nn.Module:
    """The classifier of the shadow attack: an MLP with one hidden layer, trained with Adam.

    Args:
        features: shape (n, f).
        members: boolean, shape (n,).
        seed: of its weights and batches.
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
