"""Secure aggregation: sums of messages that reveal nothing individually (Bonawitz et al., 2017).

Values are encoded as integers modulo 2^64, in steps of 2^-32. Every client adds masks shared with other clients, with
opposite signs in each pair, so that each message is uniformly random and all masks cancel in the sum. In a simulation,
masks are shared with neighbours in a ring (Bell et al., 2020), and no client drops out. Sites agree on keys for all
pairs and restore the masks of sites that drop out (:mod:`fl_lightning.remote.secure_site`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.errors import FederationError
from fl_lightning.secret import SecretStream, new_key
from fl_lightning.wire import State

Words = NDArray[np.uint64]
#: Number of fractional bits.
FRACTION = 32
#: Number of neighbours on each side of a client with shared masks.
NEIGHBOURS = 3


def largest(clients: int) -> float:
    """Return the bound of values whose sum over clients does not overflow."""
    return 2.0 ** (63 - FRACTION) / clients


def encoded(values: Tensor, clients: int) -> Words:
    """Encode values in steps of 2^-32, modulo 2^64.

    Args:
        values: shape (n,), float64.
        clients: number of rows in the sum.

    Example:
        >>> [int(word) for word in encoded(torch.tensor([1.0, -(2.0**-32)]), 2)]
        [4294967296, 18446744073709551615]
    """
    most = largest(clients)
    if not bool((values.abs() < most).all()):
        raise FederationError(
            f"Secure aggregation of {clients} clients takes weighted values below {most:.0f}, and an update is larger: "
            "set clip_norm, lower the learning rate, or set weighting to uniform."
        )
    steps: Words = (values.double() * 2.0**FRACTION).round().to(torch.int64).cpu().numpy().view(np.uint64)
    return steps


def decoded(words: Words) -> Tensor:
    """Decode values to float64.

    Example:
        >>> decoded(encoded(torch.tensor([0.5, -3.0]), 1)).tolist()
        [0.5, -3.0]
    """
    return torch.from_numpy(words.view(np.int64).copy()).double() / 2.0**FRACTION


def row(tensors: State, weight: float, clients: int) -> Words:
    """Encode a client's message as a row: its values times the client's weight, and the weight.

    Args:
        tensors: the message.
        weight: the client's weight.
        clients: number of rows in the sum.
    """
    values = [weight * value.flatten().double().cpu() for value in tensors.values()]
    return encoded(torch.cat([*values, torch.tensor([weight], dtype=torch.float64)]), clients)


def mean(total: Words, like: State) -> State:
    """Decode the weighted mean of messages from the sum of their rows.

    Args:
        total: the sum.
        like: a message with the names, shapes, types and devices of the mean.

    Example:
        >>> message = {"w": torch.tensor([1.0, -2.0])}
        >>> mean(summed([row(message, 3.0, 2), row({"w": torch.zeros(2)}, 1.0, 2)]), message)
        {'w': tensor([ 0.7500, -1.5000])}
    """
    values = decoded(total)
    parts = torch.split(values[:-1] / values[-1], [value.numel() for value in like.values()]) if like else ()
    found: State = {}
    for (name, value), part in zip(like.items(), parts, strict=True):
        shaped = part.view(value.shape) if value.is_floating_point() else part.view(value.shape).round()
        found[name] = shaped.to(value.device, value.dtype)
    return found


def check_cohort(clients: int, least: int = 2) -> None:
    """Refuse sums of too few messages.

    Args:
        clients: number of clients.
        least: minimum number of clients.
    """
    if clients < 2:
        raise FederationError("Secure aggregation of one client hides nothing: let more clients train in a round.")
    if clients < least:
        raise FederationError(
            f"Secure aggregation takes {least} clients here, not {clients}: let more clients train in a round, or "
            "lower least."
        )


def masked(rows: Sequence[Words], neighbours: int = NEIGHBOURS) -> list[Words]:
    """Mask rows: each is uniformly random, and their sum modulo 2^64 does not change.

    Every call draws new masks, with keys from the operating system.

    Args:
        rows: one row per client, of the same length.
        neighbours: number of neighbours on each side of a client in the ring.
    """
    clients = len(rows)
    check_cohort(clients)
    sent = [row.copy() for row in rows]
    for client in range(clients):
        for step in range(1, min(neighbours, clients // 2) + 1):
            mask = SecretStream(new_key()).words(len(rows[client]))
            sent[client] += mask
            sent[(client + step) % clients] -= mask
    return sent


def summed(sent: Sequence[Words]) -> Words:
    """Sum rows modulo 2^64: the server's computation."""
    total: Words = np.sum(np.stack(sent), axis=0, dtype=np.uint64)
    return total
