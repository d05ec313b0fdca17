"""Matching of the clients' hidden units under a Beta-Bernoulli process prior (BBP-MAP).

Wang et al. (2020), "Federated Learning with Matched Averaging", after Yurochkin et al. (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Array = NDArray[np.float64]
Places = NDArray[np.int64]
#: Minimum distance of an atom's number of clients from zero and from all.
EDGE = 1e-3


@dataclass(frozen=True)
class Matching:
    """Prior of the atoms and length of the search.

    Args:
        sigma: standard deviation of a client's unit around its atom.
        sigma0: standard deviation of the atoms around zero.
        gamma0: concentration; larger values create new atoms more readily.
        sweeps: maximum number of rematching passes over the clients; stops early if nothing changes.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma0: float = 7.0
    sweeps: int = 5

    def __call__(
        self, reference: Array, clients: Sequence[Array], rng: np.random.Generator, most: int | None = None
    ) -> tuple[list[Places], int]:
        """Match the units of every client to atoms, starting from those of a reference model.

        Args:
            reference: units of the server's model, shape (width, numbers): the first atoms, which are always kept, so
                that the order of units is stable over rounds.
            clients: units of every client, each of this shape.
            rng: generator for the order of clients.
            most: maximum number of atoms; None allows no new ones.

        Returns:
            The atom of every unit, by client, and the number of atoms.
        """
        search = _Search(self, reference, clients, len(reference) if most is None else most)
        for sweep in range(1 + self.sweeps):
            before = [place.copy() for place in search.places]
            for client in rng.permutation(len(clients)):
                search.rematch(int(client))
            if sweep and all(np.array_equal(a, b) for a, b in zip(before, search.places, strict=True)):
                break
        return search.places, len(search.counts)

    def old_score(self, sums: Array, counts: Array, units: Array, parties: int) -> Array:
        """Return the gain of assigning each unit to each atom, shape (units, atoms).

        sum over numbers of (m_i + theta / sigma^2)^2 / (S_i + 1 / sigma^2) - m_i^2 / S_i, plus 2 log(n_i / (J - n_i)),
        for m_i the sum of theta / sigma^2 over the atom's units and S_i = 1 / sigma0^2 + n_i / sigma^2.
        """
        precision, shares = 1 / self.sigma**2, np.clip(counts, EDGE, parties - EDGE)
        spread = 1 / self.sigma0**2 + counts * precision
        own, squares = (sums**2).sum(1), ((units * precision) ** 2).sum(1)
        joint = (own + 2 * precision * units @ sums.T + squares[:, None]) / (spread + precision) - own / spread
        score: Array = joint + 2 * np.log(shares / (parties - shares))
        return score

    def new_score(self, units: Array, number: int, parties: int) -> Array:
        """Return the gain of assigning each unit to the t-th new atom, t = 1 ... number, shape (units, number)."""
        precision = 1 / self.sigma**2
        gain = ((units * precision) ** 2).sum(1) / (1 / self.sigma0**2 + precision)
        t = np.arange(1, number + 1)
        score: Array = gain[:, None] - 2 * np.log(t) + 2 * np.log(self.gamma0 / parties)
        return score


class _Search:
    """Atoms, as sums of their units, and the assignment of units."""

    def __init__(self, prior: Matching, reference: Array, clients: Sequence[Array], most: int) -> None:
        self.prior, self.clients, self.most, self.kept = prior, clients, most, len(reference)
        self.parties = len(clients) + 1
        self.sums = reference / prior.sigma**2
        self.counts = np.ones(len(reference))
        self.places: list[Places] = [np.full(len(units), -1, dtype=np.int64) for units in clients]

    def rematch(self, client: int) -> None:
        """Remove a client's units from their atoms and match them again."""
        units = self.clients[client]
        if self.places[client][0] >= 0:
            self._take_out(client)
        room = min(self.most - len(self.counts), len(units))
        score = self.prior.old_score(self.sums, self.counts, units, self.parties)
        if room > 0:
            score = np.concatenate([score, self.prior.new_score(units, room, self.parties)], 1)
        rows, places = linear_sum_assignment(score, maximize=True)
        # The order of new atoms does not matter: number them in the order of their units, without gaps.
        new = places >= len(self.counts)
        fresh = int(new.sum())
        places[new] = len(self.counts) + np.arange(fresh)
        self.sums = np.pad(self.sums, ((0, fresh), (0, 0)))
        self.counts = np.pad(self.counts, (0, fresh))
        self.places[client][rows] = places
        self.sums[places] += units[rows] / self.prior.sigma**2  # indices are distinct
        self.counts[places] += 1

    def _take_out(self, client: int) -> None:
        self.sums[self.places[client]] -= self.clients[client] / self.prior.sigma**2
        self.counts[self.places[client]] -= 1
        stays = self.counts > 0.5
        if not stays.all():
            number = np.cumsum(stays) - 1
            self.sums, self.counts = self.sums[stays], self.counts[stays]
            self.places = [np.where(place >= 0, number[place], -1) for place in self.places]
