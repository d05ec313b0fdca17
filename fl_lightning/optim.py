"""Server optimizers, and the schedulers of their learning rates.

The optimizers are those of "Adaptive Federated Optimization" (Reddi et al., ICLR 2021, Algorithm 2). They replace plain
SGD at the server; their gradient is minus the clients' mean change. They differ from torch's ``Adam`` as the paper
does: no bias correction, an adaptivity ``tau`` of 1e-3 outside the square root, and a second moment that starts at
``tau**2`` rather than at zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import ParamsT

from fl_lightning.errors import FederationError


class _Adaptive(Optimizer):
    """Base class: ``m = b1 m + (1 - b1) g``, a second moment ``v``, ``w -= lr m / (sqrt(v) + tau)``."""

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], tau: float) -> None:
        if lr < 0 or tau <= 0 or not all(0 <= beta < 1 for beta in betas):
            given = f"lr={lr}, tau={tau}, betas={betas}"
            raise FederationError(f"{type(self).__name__} needs lr >= 0, tau > 0 and betas in [0, 1), not {given}.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "tau": tau})

    @staticmethod
    @abstractmethod
    def _update_second(v: Tensor, squared: Tensor, beta: float) -> None:
        """Update ``v`` in place with the squared gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; parameters without a gradient are unchanged.

        Args:
            closure: reevaluates the model and returns the loss; not needed at a server.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter)
                    state["v"] = torch.full_like(parameter, group["tau"] ** 2)
                state["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                self._update_second(state["v"], gradient.square(), beta2)
                parameter.addcdiv_(state["m"], state["v"].sqrt().add_(group["tau"]), value=-group["lr"])
        return loss


class FedAdam(_Adaptive):
    """FedAdam's server optimizer: ``v = b2 v + (1 - b2) g**2``.

    Args:
        params: the server's parameters.
        lr: the server's learning rate (eta in the paper).
        betas: decay of the first and second moments.
        tau: degree of adaptivity; smaller is more adaptive.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> w.grad = torch.ones(1)
        >>> _ = FedAdam([w], lr=1.0, betas=(0.0, 0.0), tau=1.0).step()
        >>> w.item()
        -0.5
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, betas, tau)

    @staticmethod
    def _update_second(v: Tensor, squared: Tensor, beta: float) -> None:
        v.mul_(beta).add_(squared, alpha=1 - beta)


class Yogi(_Adaptive):
    """FedYogi's server optimizer: ``v -= (1 - b2) g**2 sign(v - g**2)``.

    Unlike Adam's, the second moment changes by at most the squared gradient, so it forgets large gradients slowly.

    Args:
        params: the server's parameters.
        lr: the server's learning rate (eta in the paper).
        betas: decay of the first and second moments.
        tau: degree of adaptivity; smaller is more adaptive.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> w.grad = torch.ones(1) * 2
        >>> _ = Yogi([w], lr=1.0, betas=(0.0, 0.25), tau=1.0).step()
        >>> round(w.item(), 6)  # v = 1 + 0.75 * 4 = 4
        -0.666667
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, betas, tau)

    @staticmethod
    def _update_second(v: Tensor, squared: Tensor, beta: float) -> None:
        v.addcmul_(squared, torch.sign(v - squared), value=beta - 1)


def step_schedulers(configs: Iterable[Any], rounds: int, metrics: Mapping[str, Any]) -> None:
    """Step the schedulers of the server's optimizer at the end of a round; a round is both an epoch and a step.

    A scheduler counts its steps, so it is never stepped twice for the same rounds.

    Args:
        configs: ``trainer.lr_scheduler_configs``.
        rounds: number of completed rounds.
        metrics: ``trainer.callback_metrics``, for schedulers that monitor a metric.
    """
    for config in configs:
        scheduler, due = config.scheduler, rounds // config.frequency
        while scheduler.last_epoch < due:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(_monitored(config, metrics))
            else:
                scheduler.step()


def _monitored(config: Any, metrics: Mapping[str, Any]) -> float:
    """Return the metric that a scheduler monitors."""
    if config.monitor not in metrics:
        known = ", ".join(sorted(map(str, metrics)))
        raise FederationError(
            f"ReduceLROnPlateau follows {config.monitor!r}, which no round logs: set monitor to one of {known}."
        )
    return float(metrics[config.monitor])
