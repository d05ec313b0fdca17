"""Secure aggregation, simulated: sums out of messages that tell nothing one by one (Bonawitz et al., 2017).

Values are written as whole numbers modulo 2^64, in steps of 2^-32. Every client adds to its own the masks that it has
in common with its neighbours in a ring, one of the two with a minus sign, so that each message is uniformly random and
the masks of all of them cancel (Bell et al., 2020, for neighbours instead of all pairs). Clients that drop out,
whose masks a real protocol restores, and the agreement on keys are not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.secret import SecretStream, new_key

Words = NDArray[np.uint64]
#: Bits after the point.
FRACTION = 32
#: Neighbours on each side of a client with which it has masks in common.
NEIGHBOURS = 3


def encoded(values: Tensor, clients: int) -> Words:
    """Values in steps of 2^-32, modulo 2^64.

    Args:
        values: shape (n,), float64.
        clients: how many such rows are to be added up.

    Example:
        >>> [int(word) for word in encoded(torch.tensor([1.0, -(2.0**-32)]), 2)]
        [4294967296, 18446744073709551615]
    """
    most = 2.0 ** (63 - FRACTION) / clients
    if not bool((values.abs() < most).all()):
        raise FederationError(
            f"Secure aggregation of {clients} clients takes weighted values below {most:.0f}, and an update is larger: "
            "set clip_norm, lower the learning rate, or set weighting to uniform."
        )
    steps: Words = (values.double() * 2.0**FRACTION).round().to(torch.int64).cpu().numpy().view(np.uint64)
    return steps


def decoded(words: Words) -> Tensor:
    """The values again, float64.

    Example:
        >>> decoded(encoded(torch.tensor([0.5, -3.0]), 1)).tolist()
        [0.5, -3.0]
    """
    return torch.from_numpy(words.view(np.int64).copy()).double() / 2.0**FRACTION


def masked(rows: Sequence[Words], neighbours: int = NEIGHBOURS) -> list[Words]:
    """The rows as clients send them: each alone uniformly random, their sum modulo 2^64 unchanged.

    Masks are drawn anew from keys of the operating system in every call.

    Args:
        rows: one for each client, of one length.
        neighbours: on each side of a client in the ring.
    """
    clients = len(rows)
    if clients < 2:
        raise FederationError("Secure aggregation of one client hides nothing: let more clients train in a round.")
    sent = [row.copy() for row in rows]
    for client in range(clients):
        for step in range(1, min(neighbours, clients // 2) + 1):
            mask = SecretStream(new_key()).words(len(rows[client]))
            sent[client] += mask
            sent[(client + step) % clients] -= mask
    return sent


def summed(sent: Sequence[Words]) -> Words:
    """The server's computation."""
    total: Words = np.sum(np.stack(sent), axis=0, dtype=np.uint64)
    return total
