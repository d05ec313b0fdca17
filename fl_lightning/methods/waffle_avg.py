"""WAFFLE by weighted averaging (Beaussart et al., 2021): SCAFFOLD that turns by and by from all agents to one."""

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

#: Prefix of a client's new control variate, which it sends up with ``control="weighted_mean"``.
NEW = "control.new."
#: The last raw weights, as many as smoothing needs, shape (rounds, agents of interest, clients), float64.
RAW = "raw_weights"
#: Distances that differ by less are the same.
SAME = 1e-12


class WAFFLEAvg(AgentsOfInterest, SCAFFOLD):
    """Clients train as in SCAFFOLD; the server weighs them by their distance from the agent of interest.

    In round r of R (Algorithm 1), with d_i = ||dy_i - dy_agent|| and dM, dm the largest and smallest d_i of the others,

        d_agent = dm (1 - (dM - dm) / dM (1 - Omega(r)))            (2)
        a_i     = max(Psi(r) - (d_i - d_agent) / (dM - d_agent), 0)  (3)

    and only the agent counts from round ``local_from`` R on. Normalised weights are averaged over the last three
    rounds, abar, and with them x <- x + sum_i abar_i dy_i. Omega and Psi fall from near 1, where most agents count,
    to near 0.

    Equal distances give equal weights. Where nothing is left (Psi = 0) and where there is nobody else, the agent has
    all the weight. Once smoothed weights are the agent's alone for good, only the agent is trained.

    Args:
        net: the network.
        control: how the server's control variate follows: ``eq1``, c <- c + sum_i abar_i dc_i, as the paper has it, or
            ``weighted_mean``, c <- sum_i abar_i c_i. With weights that change the first drifts: once the agent is
            alone, c - c_agent stays as it is for ever and bends its training. The second does not, and equals the first
            for constant weights.
        omega: Omega as a function of r / R, a :class:`~fl_lightning.methods.schedules.Schedule` or any callable; None
            is the paper's sigmoid with slope 3.2.
        psi: Psi, likewise.
        rounds: R; None means the Trainer's ``max_epochs``.
        local_from: share of the rounds after which only the agent of interest counts.
        smoothing: number of rounds that weights are averaged over; 1 does not smooth.
        before_first: what the first rounds average with: equal weights (``uniform``) or only rounds there are
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
            if callable(self.hparams.get(name)):  # noted as plain values, which load with weights_only=True
                self.hparams[name] = describe(self.hparams[name])

    # ---- weights --------------------------------------------------------------------------------------------

    @property
    def total_rounds(self) -> int:
        """R."""
        return self.rounds if self.rounds is not None else int(self.trainer.max_epochs or -1)

    @property
    def first_local(self) -> int:
        """The first round, from 1, whose raw weights are the agent's alone: r >= local_from R, in exact arithmetic."""
        return max(1, math.ceil(Fraction(str(self.local_from)) * self.total_rounds))

    def setup(self, stage: str) -> None:
        """The schedules need to know how long the run is."""
        super().setup(stage)
        if stage == "fit" and self.total_rounds < 1:
            raise FederationError("WAFFLEAvg's weights follow the number of rounds: set max_epochs or rounds.")

    def may_count(self, round: int) -> Tensor:
        """Everyone, until the smoothed weights are the agents' alone."""
        if round + 1 < self.first_local + self.smoothing - 1:
            return super().may_count(round)
        return torch.stack([one_hot(self.clients_known, agent) for agent in self.agents]).bool()

    def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
        """Smoothed weights; raw ones of the rounds that smoothing needs are remembered."""
        raw = self.raw_weights(distances)
        clients = self.clients_known
        past = self.memory.get(RAW, torch.zeros(0, *raw.shape, dtype=raw.dtype)).cpu()
        if self.this_round < self.first_local:
            # Nothing is known of agents whose own update is left out: they weigh as in the round before.
            last = past[-1] if len(past) else torch.full_like(raw, 1 / clients)
            raw = torch.where(moved.isnan()[:, None], last, raw)
        window = torch.cat([past, raw[None]])[-self.smoothing :]
        self.memory[RAW] = window[-(self.smoothing - 1) or len(window) :].to(self.device)
        missing = self.smoothing - len(window) if self.before_first == "uniform" else 0
        return (window.sum(0) + missing / clients) / (len(window) + missing)

    def raw_weights(self, distances: Tensor) -> Tensor:
        """Normalised weights of this round before smoothing, shape (agents of interest, clients)."""
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
        """Do as SCAFFOLD; with ``weighted_mean`` c_i goes up instead of its change, which the server could add up."""
        up, keep = super().leave(state, received, me)
        if self.control_rule == "weighted_mean":
            up = without(CHANGE, up) | prefixed(NEW, under(OWN, keep or {}))
        return Reply(up, keep)

    # server

    def combine(self, messages: Sequence[Message], weights: Sequence[float], before: State) -> State:
        """The mean model, and c by the rule (Eq. 1)."""
        after, mean = super().combine(messages, weights, before), self.control_rule == "weighted_mean"
        prefix = NEW if mean else CHANGE
        moved = self.mean(messages, weights, [prefix + name for name in self.trainable_names])
        for name in self.trainable_names:
            value = moved[prefix + name]
            after[SERVER + name] = value if mean else before[SERVER + name] + value
        return after

    def aggregate(self, messages: list[Message]) -> State:
        """Combine as every agent's federation does; with ``all`` the server's own c is their mean, as its model is."""
        target = super().aggregate(messages)
        for name, control in self.server_control().items():
            control.copy_(target.pop(SERVER + name))
        return target


def calculate_weights(distances: Tensor, agent: int, omega: float, psi: float) -> Tensor:
    """CalcWeights of Algorithm 1 (Equations 2 and 3) for one round, normalised.

    Args:
        distances: d_i of every client, NaN for those that are left out, shape (clients,), float64.
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
