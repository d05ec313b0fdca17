"""Weight Erosion (Grimberg et al., 2020): agents lose weight in every round in which they differ from Alice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.methods.lib.agents import AgentsOfInterest
from fl_lightning.nets import FedNet
from fl_lightning.ranges import NonNegative

#: Remaining weights, shape (agents of interest, clients), float64.
LEFT = "erosion.left"
#: Updates of a smaller norm count as zero.
TINY = 1e-12


class WeightErosion(AgentsOfInterest):
    """FedAvg for one agent: the others' weights decrease, faster the more their updates differ from the agent's.

    All weights start at 1. In round r = 1, 2, ... agent i with n_i samples is at the relative distance

        d_i = ||g_i - g_agent|| / ||g_agent||,    g_i = -dy_i / lr,

    and loses p_d (1 + p_s floor((r - 1) B / n_i)) d_i of its weight, which never falls below 0; B is the batch size. If
    g_agent is 0, distances are undefined and no agent loses weight. The update of the model is the weighted mean of all
    updates. A weight of 0 stays 0, so such agents are not trained any more.

    Args:
        net: the network.
        distance_penalty: p_d; None means 0.1 / N.
        size_penalty: p_s, additional loss of agents with little data once their samples have been seen.
        kwargs: see :class:`~fl_lightning.methods.lib.agents.AgentsOfInterest` (``agent_of_interest``) and
            :class:`~fl_lightning.module.FederatedModule`.
    """

    of_the_run = (*AgentsOfInterest.of_the_run, LEFT)

    def __init__(
        self, net: FedNet, distance_penalty: NonNegative | None = None, size_penalty: NonNegative = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(net, weighting="uniform", **kwargs)
        self.distance_penalty, self.size_penalty = distance_penalty, size_penalty

    def weigh(self, distances: Tensor, moved: Tensor) -> Tensor:
        """Decrease and normalise the weights; excluded clients lose nothing."""
        clients = self.clients_known
        penalty = 0.1 / clients if self.distance_penalty is None else self.distance_penalty
        sizes = torch.tensor([client.samples for client in self.roster]).clamp_min(1)  # 0 before a client joins
        passes = (self.this_round - 1) * self.local.batch_size // sizes
        relative = (distances / moved[:, None]).where(moved[:, None] >= TINY, 0.0).nan_to_num(0.0)
        left = (self._left() - penalty * (1 + self.size_penalty * passes) * relative).clamp_min(0.0)
        self.memory[LEFT] = left.to(self.device)
        return left / left.sum(1, keepdim=True)

    def may_count(self, round: int) -> Tensor:
        """Return clients with a positive weight."""
        return self._left() > 0

    def _left(self) -> Tensor:
        whole = torch.ones(len(self.agents), self.clients_known, dtype=torch.float64)
        return self.memory.get(LEFT, whole).cpu()
