"""Weights of all agents for the agent of interest, by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning import loggers
from fl_lightning.arguments import NamedArguments
from fl_lightning.errors import FederationError
from fl_lightning.ranges import CountOrZero
from fl_lightning.wire import Message

#: With more agents than this, only the own weight is logged; the figure shows all.
CURVES = 20
#: Maximum number of agents of interest in a figure.
PANELS = 12


@runtime_checkable
class WeighsAgents(Protocol):
    """Interface of methods with an agent of interest."""

    @property
    def agents(self) -> list[int]:
        """Agents of interest."""
        ...

    def weight_history(self) -> Tensor:
        """Return the weights of every round, shape (rounds, agents of interest, clients)."""
        ...

    def distance_history(self) -> Tensor:
        """Return the distances of every round, NaN for clients that did not train, same shape."""
        ...


def local_since(weights: Tensor, agent: int) -> int | None:
    """Return the round, from 1, from which the agent of interest has all the weight; None if there is none.

    Args:
        weights: weights of the agent's federation, shape (rounds, clients).
        agent: the agent.

    Example:
        >>> local_since(torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.9, 0.1], [1.0, 0.0], [1.0, 0.0]]), 0)
        4
    """
    mixed = torch.nonzero(~(weights[:, agent] >= 1)).flatten()
    since = int(mixed[-1]) + 2 if len(mixed) else 1
    return since if since <= len(weights) else None


class AgentWeightsCallback(NamedArguments, Callback):
    """Logs every agent's weight and distance by round, for Weight Erosion, WAFFLEAvg and similar methods.

    Logged under ``agents/``: ``weight/<i>`` and ``distance/<i>`` of client i; ``own_weight``, the weight of the agent
    of interest itself, from about 1/N at first to 1 for local training; and ``local_since``, the round from which
    training is local. With several agents of interest the last two are means over them, and weights are drawn but not
    logged individually. Methods without client weights are refused.

    The figure of weights by round (figure 3 of the WAFFLE paper) is logged to TensorBoard as ``agents/weights`` and
    saved as ``agent_weights.png`` in the log folder at the end of the fit.

    Args:
        every: rounds between figures in TensorBoard; 0 draws only the last one.
        folder: folder of the final figure; None means the Trainer's log folder.
    """

    def __init__(self, every: CountOrZero = 10, folder: str | None = None) -> None:
        self.every, self.folder = every, folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse methods without client weights."""
        if not isinstance(pl_module, WeighsAgents):
            raise FederationError(
                "AgentWeightsCallback needs a method with an agent of interest, such as WAFFLEAvg, not "
                f"{type(pl_module).__name__}."
            )

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Log the round's weights and distances, and draw the weights so far every ``every`` rounds."""
        module: Any = pl_module
        weights, agents = module.weight_history().cpu(), module.agents
        own = [float(weights[-1, row, agent]) for row, agent in enumerate(agents)]
        logs = {"own_weight": sum(own) / len(own)}
        since = [local_since(weights[:, row], agent) for row, agent in enumerate(agents)]
        if all(since):
            logs["local_since"] = sum(map(float, since)) / len(since)  # type: ignore[arg-type]
        if len(agents) == 1 and weights.shape[-1] <= CURVES:
            distances = module.distance_history()[-1, 0].tolist()
            logs |= {f"weight/{client}": float(weight) for client, weight in enumerate(weights[-1, 0])}
            logs |= {f"distance/{client}": d for client, d in enumerate(distances) if d == d}
        for name, value in logs.items():
            pl_module.log(f"agents/{name}", value, on_step=False, on_epoch=True, batch_size=1)
        if self.every and (trainer.current_epoch + 1) % self.every == 0:
            self._show(trainer, module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw all rounds, to TensorBoard and the log folder."""
        module: Any = pl_module
        folder = self.folder or trainer.log_dir  # broadcast, so call it on every rank
        if not len(module.weight_history()) or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        self._show(trainer, module)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            picture(module.weight_history(), module.agents).savefig(Path(folder) / "agent_weights.png", dpi=110)

    def _show(self, trainer: Trainer, module: Any) -> None:
        if trainer.loggers and trainer.is_global_zero:
            shown = picture(module.weight_history(), module.agents)
            loggers.show(trainer, "agents/weights", shown, trainer.current_epoch, files=False)


def picture(weights: Tensor, agents: list[int]) -> Any:
    """Draw every agent's weight by round, one panel per agent of interest, whose own line is thick.

    Args:
        weights: shape (rounds, agents of interest, clients).
        agents: the agents of interest; the first twelve are drawn.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    drawn = agents[:PANELS]
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(max(7, 4 * columns), 1 + 2.8 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).flatten()
    rounds = range(1, len(weights) + 1)
    for panel, (row, agent) in zip(panels, enumerate(drawn), strict=False):
        for client, line in enumerate(weights[:, row].T.cpu().numpy()):
            own = client == agent
            panel.plot(rounds, line, linewidth=2.5 if own else 1.0, color="black" if own else None, label=str(client))
        panel.set(title=f"agent {agent}", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    figure.supxlabel("round")
    figure.supylabel("weight")
    if weights.shape[-1] <= CURVES:
        panels[0].legend(fontsize="x-small", title="client", ncols=2)
    return figure
