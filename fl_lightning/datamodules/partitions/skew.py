"""Agents with rotated label distributions (distributions A, B and C of WAFFLE with weighted averaging)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.base import Partition, PartitionScheme, Pool
from fl_lightning.datamodules.partitions.deal import (
    ClassTable,
    Counts,
    client_index,
    holdout,
    nearest_multiple,
)
from fl_lightning.errors import FederationError
from fl_lightning.ranges import Count, Part

Shares = NDArray[np.float64]
#: The published base vectors over ten classes (docs/partitions.md).
BASES: dict[str, list[float]] = {
    "A": [0.1] * 10,
    "B": [0.25] * 4 + [0.0] * 6,
    "C": [0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.2, 0.1, 0.0, 0.0],
}
_MOST_TEST_ROWS = 200_000_000
_EPS = 1e-9  # 0.1 * 6000 must count as 600 even if the product is just below


class LabelSkew(PartitionScheme):
    """Rotate a base vector of class shares by i for agent i (docs/partitions.md); agent 0 is the agent of interest.

    Agent i receives ``floor(p_i[c] * classes / clients * n_c)`` training samples of class c, consecutive rows of the
    shuffled class. It is tested on the fraction ``p_i[c] / max(p_i)`` of the official test rows of class c. Only in
    this scheme may test sets of different agents overlap (under distribution A each of them is the whole test set); no
    test row is ever trained on. Without official test rows, a stratified fraction is held out.

    Args:
        base: agent 0's share of every class, or a published distribution: A (uniform), B (four classes) or C (five
            classes around one peak).
        clients: number of agents; a multiple of the number of classes uses every sample.
        samples_per_agent: exact number of training samples of every agent; None deals all samples.
        test_samples: maximum number of test samples per agent; None for no limit.
        test_fraction: fraction held out for testing if there are no official test rows.
    """

    def __init__(
        self,
        base: Literal["A", "B", "C"] | list[float] = "A",
        clients: Count = 10,
        samples_per_agent: Count | None = None,
        test_samples: Count | None = None,
        test_fraction: Part = 0.2,
    ) -> None:
        self.base = base
        self.clients = clients
        self.samples_per_agent = samples_per_agent
        self.test_samples = test_samples
        self.test_fraction = test_fraction

    def split(self, pool: Pool, rng: np.random.Generator) -> Partition:
        """Deal the pool's rows."""
        rows, held = pool.train_rows, pool.test_rows
        if not len(held):
            rows, held = holdout(pool.labels, rows, self.test_fraction, rng)
        shares = rotations(self._vector(pool.classes), self.clients)
        table = ClassTable.of(pool.labels, rows, pool.classes, rng)
        train = client_index(*table.deal(self._train_counts(shares, table.counts)))
        tests = ClassTable.of(pool.labels, held, pool.classes, rng)
        counts = self._test_counts(shares, tests.counts)
        test = client_index(*tests.segments(np.zeros_like(counts), counts))
        return Partition(train, test, global_test=torch.from_numpy(np.sort(held)))

    def _vector(self, classes: int) -> Shares:
        """Return agent 0's share of every class, checked and normalised, shape (classes,)."""
        if isinstance(self.base, str) and self.base not in BASES:
            raise FederationError(f"There is no distribution {self.base!r}: use A, B, C or a list of shares.")
        named = BASES[self.base] if isinstance(self.base, str) else self.base
        vector: Shares = np.asarray(named, dtype=np.float64)
        if self.base == "A":
            vector = np.full(classes, 1 / classes)
        if len(vector) != classes:
            raise FederationError(
                f"The base vector has {len(vector)} shares but the data has {classes} classes: give a list of "
                f"{classes}."
            )
        if not np.isfinite(vector).all() or vector.min() < 0 or abs(vector.sum() - 1) > 1e-6:
            raise FederationError(
                f"The shares of the base vector must be 0 or more and sum to 1, not {vector.sum():g}."
            )
        vector /= vector.sum()
        return vector

    def _train_counts(self, shares: Shares, counts: Counts) -> Counts:
        """Return the number of training samples of every agent and class, shape (agents, classes)."""
        agents, classes = shares.shape
        full: Counts = np.floor(shares * classes / agents * counts + _EPS).astype(np.int64)
        over = full.sum(axis=0) - counts
        if over.max() > 0:
            raise FederationError(
                f"{agents} agents would need {over.max()} more samples of class {over.argmax()} than there are: use "
                f"{nearest_multiple(agents, classes)} agents (a multiple of {classes})."
            )
        if self.samples_per_agent is None:
            return full
        wanted = apportion(shares, self.samples_per_agent)
        if (wanted > full).any():
            most = int(np.floor((full[shares > 0] / shares[shares > 0]).min()))
            raise FederationError(
                f"samples_per_agent={self.samples_per_agent} is more than every agent can have: use at most {most}."
            )
        return wanted

    def _test_counts(self, shares: Shares, counts: Counts) -> Counts:
        """Return the number of test samples of every agent and class, shape (agents, classes)."""
        wanted: Counts = np.floor(shares / shares.max(axis=1, keepdims=True) * counts + _EPS).astype(np.int64)
        if self.test_samples is not None:
            whole = wanted.sum(axis=1, keepdims=True)
            wanted = np.where(whole > self.test_samples, apportion(wanted / whole, self.test_samples), wanted)
        if wanted.sum() > _MOST_TEST_ROWS:
            raise FederationError(
                f"The overlapping test sets of {len(shares)} agents have {wanted.sum():,} rows: limit them with "
                "test_samples=1000."
            )
        return wanted


def rotations(vector: Shares, agents: int) -> Shares:
    """Rotate the vector right by i for agent i, shape (agents, classes).

    Example:
        >>> rotations(np.array([0.7, 0.2, 0.1]), 2).tolist()
        [[0.7, 0.2, 0.1], [0.1, 0.7, 0.2]]
    """
    classes = np.arange(len(vector))
    rotated: Shares = vector[(classes - np.arange(agents)[:, None]) % len(classes)]
    return rotated


def apportion(shares: Shares, total: int) -> Counts:
    """Round each row's shares of ``total`` to integers that sum to ``total`` (largest remainder method).

    Example:
        >>> apportion(np.array([[0.5, 0.25, 0.25]]), 10).tolist()
        [[5, 3, 2]]
    """
    exact = shares * total
    counts: Counts = np.floor(exact + _EPS).astype(np.int64)
    missing = total - counts.sum(axis=1, keepdims=True)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    counts += rank < missing
    return counts
