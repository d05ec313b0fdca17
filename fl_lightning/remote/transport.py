"""Interface to send requests to sites and receive replies; implemented for Flower in :mod:`fl_lightning.flower`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class Transport(Protocol):
    """A connection to nodes, each of which is one site. It transports bytes without interpreting them."""

    def present(self) -> list[str]:
        """Return the names of the nodes that can be reached now."""
        ...

    def post(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each node its request and yield every node once, with its reply or an error message.

        Args:
            requests: the request by node.
            seconds: time limit; later replies are dropped.
        """
        ...

    def close(self) -> None:
        """Close the connection to all nodes."""
        ...
