"""The configuration of a run for a site's operator to approve: method, settings and net, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.engine import entries
from fl_lightning.persistence import FREE
from fl_lightning.remote.envelope import checksum
from fl_lightning.wire import Message, State

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Number of characters of a fingerprint.
DIGITS = 16
#: Shown for a run without protection of clients.
UNPROTECTED = "none: the server sees the messages of this client as they are"
#: Settings that concern only the server or only one machine.
LOCAL = (*FREE, "server_optimizer", "aggregation", "weighting")


@runtime_checkable
class Guard(Protocol):
    """A callback that protects a client; with real sites it runs at each of them."""

    @property
    def guards(self) -> bool:
        """Whether it acts at a client."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return its settings as plain values."""
        ...

    def install(self, method: FederatedModule) -> None:
        """Prepare a client's method."""
        ...

    def protect(self, method: FederatedModule, received: State, message: Message) -> None:
        """Change a client's message before it leaves."""
        ...


class RunConfiguration(NamedTuple):
    """Everything that determines what a client computes and sends, as plain values.

    Both sides derive it from their own configuration before training; a site rejects a run with another fingerprint.
    """

    method: str
    settings: dict[str, str]
    net: str
    """Class of the net and a checksum of its structure and initial weights."""
    seed: int
    guards: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, method: FederatedModule, callbacks: Sequence[Any] = ()) -> RunConfiguration:
        """Return the configuration of an untrained method.

        Args:
            method: the method.
            callbacks: the run's callbacks, of which those that protect clients are included.
        """
        secure = any(isinstance(one, SecureAggregationCallback) for one in callbacks)  # clients apply the weights
        local = set(LOCAL) - {"weighting"} if secure else LOCAL
        settings = {name: _text(value) for name, value in sorted(method.hparams.items()) if name not in local}
        guards = {type(one).__name__: one.settings() for one in callbacks if isinstance(one, Guard) and one.guards}
        net = f"{type(method.net).__name__} {checksum(entries(method.net))[:DIGITS]}"
        return cls(type(method).__name__, settings, net, method.seed, guards)

    @property
    def fingerprint(self) -> str:
        """Checksum of the configuration."""
        text = json.dumps(self._asdict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    def lines(self) -> list[str]:
        """Format the configuration for the person who approves it."""
        given = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value != "None")
        guards = [f"{name}: {', '.join(f'{k} {v}' for k, v in one.items())}" for name, one in self.guards.items()]
        return [
            f"method       {self.method}",
            f"settings     {given}",
            f"net          {self.net}",
            f"seed         {self.seed}",
            f"protection   {'; '.join(guards) or UNPROTECTED}",
            f"fingerprint  {self.fingerprint}",
        ]


def _text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
