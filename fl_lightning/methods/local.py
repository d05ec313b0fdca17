"""Local: every client for itself."""

from __future__ import annotations

from fl_lightning.module import FederatedModule


class Local(FederatedModule):
    """No messages: each client keeps its own model and trains it in every round, all from the same initial one."""

    def is_private(self, name: str) -> bool:
        """Everything stays with the client."""
        return True

    def cohort(self, round: int) -> list[int]:
        """All clients, whatever share the DataModule samples."""
        return list(range(self.federation.num_clients))
