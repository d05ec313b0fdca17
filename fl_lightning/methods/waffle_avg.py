"""WAFFLE by weighted averaging (Beaussart et al., 2021): SCAFFOLD that gradually moves from all agents to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.agents import AgentsOfInterest, one_hot
from fl_lightning.methods.scaffold import CHANGE, OWN, SCAFFOLD, SERVER
from fl_lightning.methods.schedules import AnySchedule, describe, made
from fl_lightning.nets import FedNet
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import Count, NonNegative
from fl_lightning.wire import Message, State, prefixed, under, without

#: Prefix of a client's new control variate, which it sends with ``control="weighted_mean"``.
NEW = "control.new."
#: The last raw weights, as needed for smoothing, shape (rounds, agents of interest, clients), float64.
RAW = "raw_weights"
#: Distances that differ by less count as equal.
SAME = 1e-12


class WAFFLEAvg(AgentsOfInterest, SCAFFOLD):
    """Clients train as in SCAFFOLD; the server weights them by their distance from the agent of interest.

    In round r of R (Algorithm 1), with d_i = ||dy_i - dy_agent|| and dM, dm the largest and smallest d_i of the others,

        d_agent = dm (1 - (dM - dm) / dM (1 - Omega(r)))            (2)
        a_i     = max(Psi(r) - (d_i - d_agent) / (dM - d_agent), 0)  (3)

    and only the agent has a weight from round ``local_from`` R on. Normalised weights are averaged over the last three
    rounds (abar), and x <- x + sum_i abar_i dy_i. Omega and Psi decrease from near 1, where most agents have a weight,
    to near 0.

    Equal distances give equal weights. If all weights are zero (Psi = 0) or there are no other agents, the agent has
    all the weight. Once only the agent can have a smoothed weight, only the agent is trained.

    Args:
        net: the network.
        control: update of the server's control variate: ``eq1``, c <- c + sum_i abar_i dc_i, as in the paper, or
            ``weighted_mean``, c <- sum_i abar_i c_i. The first drifts if weights change: once the agent is alone,
            c - c_agent is constant and biases its training. The second does not, and equals the first for constant
            weights.
        omega: Omega as a function of r / R, a :class:`~fl_lightning.methods.schedules.Schedule` or any callable; None
            means the paper's sigmoid with slope 3.2.
        psi: Psi, likewise.
        rounds: R; None means the Trainer's ``max_epochs``.
        local_from: fraction of the rounds after which only the agent of interest has a weight.
        smoothing: number of rounds to average weights over; 1 does not smooth.
        before_first: weights of rounds before the first in the average: equal (``uniform``) or left out
            (``available``).
        kwargs: see :class:`~fl_lightning.methods.lib.agents.AgentsOfInterest` (``agent_of_interest``) and
            :class:`~fl_lightning.module.FederatedModule`.
    """

    of_the_run = (*AgentsOfInterest.of_the_run, RAW)

    def __init__(
        self,
        net: FedNet,
        control: Literal["eq1", "weighted_mean"] = "eq1",
        omega: AnySchedule | None = None,
        psi: AnySchedule | None = None,
        rounds: Count | None = None,
        local_from: NonNegative = 0.95,
        smoothing: Count = 3,
        before_first: Literal["uniform", "available"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        self.control_rule, self.rounds, self.local_from = control, rounds, local_from
        self.smoothing, self.before_first = smoothing, before_first
        self.omega, self.psi = made(omega, "omega"), made(psi, "psi")
        for name in ("omega", "psi"):
            if callable(self.hparams.get(name)):  # stored as plain values, which load with weights_only=True
                self.hparams[name] = describe(self.hparams[name])

    # ---- weights --------------------------------------------------------------------------------------------

    @property
    def total_rounds(self) -> int:
        """R."""
        return self.rounds if self.rounds is not None else int(self.trainer.max_epochs or -1)

    @property
    def first_local(self) -> int:
        """First round, from 1, in which only the agent has a raw weight: r >= local_from R, in exact arithmetic."""
        return max(1, math.ceil(Fraction(str(self.local_from)) * self.total_rounds))

    def setup(self, stage: str) -> None:
        """Refuse a run of unknown length, which the schedules need."""
        super().setup(stage)
        if stage == "fit" and self.total_rounds < 1:
            raise FederationError("WAFFLEAvg's weights follow the number of rounds: set max_epochs or rounds.")

    def may_count(self, round: int) -> Tensor:
        """Return all clients until only the agents can have smoothed weights."""
        if round + 1 < self.first_local + self.smoothing - 1:
            return super().may_count(round)
        return torch.stack([one_hot(self.clients_known, agent) for agent in self.agents]).bool()

    def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
        """Return smoothed weights; store the raw ones needed for smoothing."""
        raw = self.raw_weights(distances)
        clients = self.clients_known
        past = self.memory.get(RAW, torch.zeros(0, *raw.shape, dtype=raw.dtype)).cpu()
        if self.this_round < self.first_local:
            # Agents whose own update is excluded reuse the weights of the previous round.
            last = past[-1] if len(past) else torch.full_like(raw, 1 / clients)
            raw = torch.where(moved.isnan()[:, None], last, raw)
        window = torch.cat([past, raw[None]])[-self.smoothing :]
        self.memory[RAW] = window[-(self.smoothing - 1) or len(window) :].to(self.device)
        missing = self.smoothing - len(window) if self.before_first == "uniform" else 0
        return (window.sum(0) + missing / clients) / (len(window) + missing)

    def raw_weights(self, distances: Tensor) -> Tensor:
        """Return normalised weights of this round before smoothing, shape (agents of interest, clients)."""
        clients, progress = self.clients_known, min(1.0, self.this_round / self.total_rounds)
        if self.this_round >= self.first_local:
            return torch.stack([one_hot(clients, agent) for agent in self.agents])
        omega, psi = float(self.omega(progress)), float(self.psi(progress))
        if not 0 <= omega <= 1 or not 0 <= psi < math.inf:
            raise FederationError(f"omega must lie in [0, 1] and psi be 0 or more, but are {omega} and {psi}.")
        rows = zip(distances, self.agents, strict=True)
        return torch.stack([calculate_weights(row, agent, omega, psi) for row, agent in rows])

    # ---- control variates -----------------------------------------------------------------------------------

    # client

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send c_i instead of its change with ``weighted_mean`` (the server could sum changes), else as SCAFFOLD."""
        up, keep = super().leave(state, received, me)
        if self.control_rule == "weighted_mean":
            up = without(CHANGE, up) | prefixed(NEW, under(OWN, keep or {}))
        return Reply(up, keep)

    # server

    def combine(self, messages: Sequence[Message], weights: Sequence[float], before: State) -> State:
        """Return the mean model and c, updated by ``control``."""
        after, mean = super().combine(messages, weights, before), self.control_rule == "weighted_mean"
        prefix = NEW if mean else CHANGE
        moved = self.mean(messages, weights, [prefix + name for name in self.trainable_names])
        for name in self.trainable_names:
            value = moved[prefix + name]
            after[SERVER + name] = value if mean else before[SERVER + name] + value
        return after

    def aggregate(self, messages: list[Message]) -> State:
        """Aggregate every federation; with ``all``, the server's own c is the mean of theirs, like its model."""
        target = super().aggregate(messages)
        for name, control in self.server_control().items():
            control.copy_(target.pop(SERVER + name))
        return target


def calculate_weights(distances: Tensor, agent: int, omega: float, psi: float) -> Tensor:
    """Compute the normalised weights of one round (CalcWeights of Algorithm 1, Equations 2 and 3).

    Args:
        distances: d_i of every client, NaN for excluded clients, shape (clients,), float64.
        agent: the agent of interest.
        omega: Omega(r), in [0, 1].
        psi: Psi(r), 0 or more.

    Returns:
        Weights that sum to 1, shape (clients,).

    Example:
        >>> calculate_weights(torch.tensor([0.0, 1.0, 2.0]), 0, omega=1.0, psi=1.0)
        tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    clients, d = len(distances), distances.double().clone()
    others = d[(torch.arange(clients) != agent) & d.isfinite()]
    if not len(others) or psi == 0:
        return one_hot(clients, agent)
    far, near = float(others.max()), float(others.min())
    d[agent] = near * (1 - (far - near) / far * (1 - omega)) if far >= SAME else 0.0
    spread = far - float(d[agent])
    ratios = (d - d[agent]) / spread if spread >= SAME else torch.zeros_like(d)
    raw = (psi - ratios).clamp_min(0.0).where(d.isfinite(), 0.0)
    return raw / raw.sum()
