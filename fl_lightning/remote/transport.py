"""Transport of requests to sites and of replies back; Flower does it in :mod:`fl_lightning.flower`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class Transport(Protocol):
    """A way to nodes, each of which is one site. It knows bytes and names of nodes, nothing of what they mean."""

    def present(self) -> list[str]:
        """Names of the nodes that can be reached now."""
        ...

    def post(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes | str]]:
        """Send each node its request and yield every node once, with its reply or a sentence on why there is none.

        Args:
            requests: what to send, by node.
            seconds: how long to wait; what comes later is dropped.
        """
        ...

    def close(self) -> None:
        """Let go of all nodes."""
        ...
