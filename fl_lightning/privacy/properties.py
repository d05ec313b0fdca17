"""Property inference: whether a client's data has a property, such as many samples of a class. Functions of tensors.

The adversary trains on its own data with and without the property and learns to classify the updates or models
(Ateniese et al., 2015; Melis et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.metrics import attack_auroc, best_threshold
from fl_lightning.privacy.profiles import property_direction

#: A property of a client's labels, shape (n,).
Property = Callable[[Tensor], bool]
#: Number of folds to cross-validate on shadows.
FOLDS = 5
#: Ridge penalty relative to the mean squared norm of a standardised update.
RIDGE = 0.1
#: Concentrations of the Dirichlet distributions of class shares: from single classes to uniform.
CONCENTRATIONS = (0.1, 0.5, 1.0, 10.0)
#: Maximum number of draws per client.
TRIES = 500


class Inferred(NamedTuple):
    """Result of one property inference attack."""

    scores: Tensor
    """Scores, higher for the property, shape (n,)."""
    line: float
    """Decision threshold of the scores."""
    shadow_auroc: float
    """AUROC on shadows that were not used for training."""


def infer_property(with_it: Tensor, without: Tensor, targets: Tensor, seed: int = 0) -> dict[str, Inferred]:
    """Classify updates, or answers of models, by whether the data has a property; returns results by attack.

    ``discriminant`` is a linear discriminant with diagonal covariance, ``ridge`` a ridge regression on
    standardised entries.

    Args:
        with_it: rows of shadows with the property, shape (n, D).
        without: rows of shadows without it, shape (m, D).
        targets: rows to classify, shape (k, D).
        seed: seed of the folds.
    """
    known = torch.cat((with_it, without)).double()
    flags = torch.arange(len(known)) < len(with_it)
    found = {}
    for name, score in {"discriminant": _discriminant, "ridge": _ridge}.items():
        held = _held_out(score, known, flags, seed)
        values = score(known, flags, targets.double())
        found[name] = Inferred(values, best_threshold(held, flags), float(attack_auroc(held, flags)))
    return found


def _held_out(score: Callable[..., Tensor], known: Tensor, flags: Tensor, seed: int) -> Tensor:
    """Return cross-validated scores of shadows."""
    values = torch.empty(len(known), dtype=torch.float64)
    rng = seeding.stream(seed, "attack.folds")
    for fold in range(FOLDS):
        if fold == 0:
            parts = torch.empty(len(known), dtype=torch.long)
            for side in (flags, ~flags):
                parts[side] = seeding.permutation(rng, int(side.sum())) % FOLDS
        asked = parts == fold
        if bool(asked.any()):
            values[asked] = score(known[~asked], flags[~asked], known[asked]).cpu()
    return values


def _discriminant(known: Tensor, flags: Tensor, targets: Tensor) -> Tensor:
    direction, line = property_direction(known[flags], known[~flags])
    length = direction.norm().clamp(min=1e-30)
    scores: Tensor = (targets @ direction - line) / length
    return scores


def _ridge(known: Tensor, flags: Tensor, targets: Tensor) -> Tensor:
    mean, spread = known.mean(0), known.std(0)
    spread = spread + 0.01 * spread.mean().clamp(min=1e-30)
    own, asked = ((one - mean) / spread / known.shape[1] ** 0.5 for one in (known, targets))
    signs = 2.0 * flags.double().to(known.device) - 1
    gram = own @ own.T
    weight = RIDGE * gram.diagonal().mean().clamp(min=1e-30)
    alpha = torch.linalg.solve(gram + weight * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), signs)
    scores: Tensor = asked @ (own.T @ alpha)
    return scores


def answer_profile(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return mean log probabilities of a model by true class, which reflect the classes of its training data.

    Args:
        logits: logits of some samples, shape (n, classes).
        labels: their true classes, shape (n,).
        classes: number of classes.

    Returns:
        Shape (classes * classes,), 0 for classes without a sample.

    Example:
        >>> answer_profile(torch.zeros(3, 2), torch.tensor([0, 0, 0]), 2).exp()
        tensor([0.5000, 0.5000, 1.0000, 1.0000])
    """
    known = logits.log_softmax(1)
    total = known.new_zeros(classes, known.shape[1]).index_add_(0, labels, known)
    return (total / torch.bincount(labels, minlength=classes).clamp(min=1)[:, None]).flatten()


def draw_clients(
    labels: Tensor, classes: int, holds: Property, number: int, size: int, rng: np.random.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw rows of simulated clients, equally many with and without a property, with Dirichlet class shares.

    Args:
        labels: labels of the adversary's samples, shape (n,).
        classes: number of classes.
        holds: the property, of a client's labels.
        number: number of clients of either kind.
        size: maximum number of samples of each.
        rng: generator of the draws.

    Returns:
        Indices into ``labels`` of clients with the property, and of clients without.
    """
    by_class = [torch.nonzero(labels.cpu() == c).flatten().numpy() for c in range(classes)]
    counts = np.array([len(rows) for rows in by_class])
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for attempt in range(TRIES * number):
        shares = rng.dirichlet([CONCENTRATIONS[attempt % len(CONCENTRATIONS)]] * classes)
        wanted = np.minimum(rng.multinomial(size, shares), counts)
        side = found[0 if holds(torch.from_numpy(np.repeat(np.arange(classes), wanted))) else 1]
        if len(side) < number and wanted.sum():
            drawn = [rng.choice(rows, n, replace=False) for rows, n in zip(by_class, wanted, strict=True) if n]
            side.append(torch.from_numpy(np.concatenate(drawn)))
        if min(map(len, found)) == number:
            return found
    raise FederationError(
        f"Of clients drawn from the adversary's samples {len(found[0])} have the property and {len(found[1])} have "
        f"not, and {number} of either kind are needed: choose a property that is neither rare nor certain."
    )
