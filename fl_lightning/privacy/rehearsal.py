"""Updates that an adversary simulates for clients with given rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine import settled
from fl_lightning.errors import FederationError
from fl_lightning.exchange import in_stacks, train_clients
from fl_lightning.federation import Federation
from fl_lightning.module import FederatedModule
from fl_lightning.parties import LocalData, Me, Setting
from fl_lightning.privacy.data import as_clients
from fl_lightning.wire import State


def rehearse(
    method: FederatedModule,
    federation: Federation,
    received: State,
    rows: Sequence[Tensor],
    setting: Setting,
    purpose: str = "attack.rehearsal",
) -> list[State]:
    """Simulate messages of new clients with these rows, in a round that starts from ``received``.

    Batches come from the adversary's own random stream, so they differ from the run's. No state is kept.

    Args:
        method: the method, for its local training and client hooks.
        federation: the data.
        received: the down message.
        rows: training rows of each client.
        setting: round and stage.
        purpose: purpose of the random stream.
    """
    data, engine = as_clients(federation, rows), settled(method.engine)
    before = method.seed
    own = int(seeding.stream(before, purpose, setting.round).integers(2**31))
    found: dict[int, State] = {}
    mes = [
        Me(k, k, setting.round, setting.rounds, setting.stage, setting.clients, own, data=LocalData(data, k))
        for k in range(len(rows))
    ]
    method.seed = own
    try:
        for stack in in_stacks(mes, engine.width):
            for one in train_clients(method, engine, {me.number: received for me in stack}, stack):
                found[one.me.number] = one.up
    finally:
        method.seed = before
    return [found[k] for k in range(len(rows))]


def update(method: FederatedModule, received: State, sent: State) -> Tensor:
    """Return the change of shared trainable entries between two messages, flattened, shape (D,)."""
    before, after = method.revealed(received), method.revealed(sent)
    names = [name for name in method.trainable_names if name in before and name in after]
    if not names:
        kind = type(method).__name__
        raise FederationError(
            f"Clients of {kind} receive several models, or none: this attack compares what one client received with "
            "what it sent."
        )
    return torch.cat([(after[name] - before[name]).flatten().float() for name in names])
