"""Round hooks for callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.arguments import NamedArguments
from fl_lightning.wire import Message, State


class Several(NamedArguments, Callback):
    """Base class of callbacks of which a Trainer may have several with different options.

    Lightning stores the state of callbacks by a key, by default the class; here the key includes the options, except
    the folder of output files.
    """

    #: Description of non-default options.
    _options: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    @property
    def state_key(self) -> str:
        """Class and non-default options."""
        return type(self).__qualname__ + self._options


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor to record the non-default options of the outermost call."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def noting(self: Several, *args: Any, **kwargs: Any) -> None:
        if "_options" not in vars(self):
            bound = signature.bind(self, *args, **kwargs).arguments
            bound = {n: v for n, v in bound.items() if n not in ("self", "folder")}
            passed = {n: v for n, v in bound.items() if v != signature.parameters[n].default}
            self._options = repr(passed) if passed else ""
        init(self, *args, **kwargs)

    return noting


class FederatedCallback(NamedArguments, Callback):
    """A Lightning callback with the hooks of a federated round; all do nothing by default.

    Any callback may implement any of these hooks: the loop looks them up by name and calls them between Lightning's own
    ``on_train_batch_start`` and ``on_train_batch_end``. Deriving from this class only helps type checkers and editors.
    """

    #: Whether the callback changes what clients send.
    changes_messages: ClassVar[bool] = False
    #: Whether it hides single messages from everyone except their clients.
    hides_messages: ClassVar[bool] = False

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Called at the start of a round.

        Args:
            trainer: the Trainer.
            pl_module: the federated method; it holds the server's model.
            round: the round, from 0.
            cohort: the clients that will train, stage by stage; clients of several stages are repeated.
        """

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Called before a client trains, in every process, whichever trains it.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: the message from the server.
        """

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Called after a client has trained; clients trained together end together, with one call each.

        With several processes, called only in the one that trained it.

        Client-side defences belong here: they may replace the message's tensors.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: the message to the server.
        """

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Called when a client's message is sent, after all callbacks' ``on_client_end``.

        For callbacks that read messages without changing them.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: the message to the server.
        """

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Called when all clients of a round have trained, before the server aggregates.

        In a round of several stages it is called for each stage, with ``pl_module.stage`` the current one. Server-side
        defences belong here: the list and the messages' tensors may be changed in place before aggregation.

        Args:
            trainer: the Trainer.
            pl_module: the federated method, with the server's model as sent to clients.
            messages: the received messages, one per client in the order of their numbers.
        """

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Called at the end of a round, when the server's model and the clients' snapshots are up to date.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            messages: the aggregated messages, stage by stage; in a run resumed within the round, only those of stages
                since.
        """
