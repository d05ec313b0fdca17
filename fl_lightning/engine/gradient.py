"""Two ways to differentiate a client's objective: autograd for one client, torch.func under vmap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.engine.contract import Batch, Gradient, Move, Objective, Phase, Update
from fl_lightning.wire import State


def eager_gradient(objective: Objective, state: State, names: Sequence[str]) -> tuple[State, Tensor, State]:
    """Differentiate one client's objective by autograd, which is fastest for a single model."""
    leaves = {name: state[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        loss, changed = objective({**state, **leaves})
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True)), loss.detach(), {k: v.detach() for k, v in changed.items()}


def functional_gradient(objective: Objective, state: State, names: Sequence[str]) -> tuple[State, Tensor, State]:
    """Differentiate one client's objective by ``torch.func``, which composes with vmap."""

    def of(leaves: State) -> tuple[Tensor, State]:
        return objective({**state, **leaves})

    grads, (loss, changed) = torch.func.grad_and_value(of, has_aux=True)({name: state[name] for name in names})
    return grads, loss, changed


def clipped(move: Move, max_norm: float) -> Move:
    """Return the move with its gradients clipped to a joint norm of at most ``max_norm``.

    Gradients of entries that are not in the phase's ``trainable``, such as those of a second model, are clipped
    separately, so that the two models do not affect each other.
    """

    def clip(state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        update = move(state, batch, phase, gradient)
        bounded: State = {}
        for named in (True, False):
            grads = {name: g for name, g in update.grads.items() if (name in phase.trainable) is named}
            if grads:
                norm = torch.stack([g.pow(2).sum() for g in grads.values()]).sum().sqrt()
                scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                bounded |= {name: g * scale for name, g in grads.items()}
        return update._replace(grads=bounded)

    return clip
