"""The round hooks that callbacks may implement."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.arguments import NamedArguments
from fl_lightning.wire import Message, State


class Several(NamedArguments, Callback):
    """A callback of which a Trainer may have several with different options.

    Lightning keeps the state of callbacks by a key, by default the class; here the options are part of it, but for the
    folder of their files.
    """

    #: Options that were passed, in words.
    _options: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign]

    @property
    def state_key(self) -> str:
        """The class and the options that were passed; without any the class alone."""
        return type(self).__qualname__ + self._options


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that notes the options of the outermost call that differ from the defaults."""
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
    """A Lightning callback with the hooks of a federated round, all of them doing nothing.

    Any callback may implement any of these hooks: the loop looks them up by name and calls those it finds, between
    Lightning's own ``on_train_batch_start`` and ``on_train_batch_end``. To derive from this class only helps type
    checkers and editors.
    """

    #: Whether it replaces what clients send.
    changes_messages: ClassVar[bool] = False
    #: Whether it hides single messages from everyone except their clients.
    hides_messages: ClassVar[bool] = False

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """A round begins.

        Args:
            trainer: the Trainer.
            pl_module: the federated method; it holds the server's model.
            round: the round, from 0.
            cohort: the clients that will train in it, stage after stage; one that trains in several is there as often.
        """

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """A client is about to train. Called in every process, whichever trains it.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: what the server sent to it.
        """

    def on_client_end(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """A client has trained. Clients that are trained together end together, each with a call of its own.

        With several processes, called only in the one that trained it.

        Defences at the client act here: they may replace the message's tensors.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: what it is about to send to the server.
        """

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """A client's message is sent, as all callbacks' ``on_client_end`` left it.

        Ledgers and eavesdroppers look here, and change nothing.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            client: the client's number.
            message: what it sends to the server.
        """

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """All clients of the round have trained; the server has not yet used what they sent.

        In a round of several stages it is called for each of them, with ``pl_module.stage`` the one under way. Defences
        at the server act here. The list and the messages' tensors may be changed in place, and the server
        aggregates what is left.

        Args:
            trainer: the Trainer.
            pl_module: the federated method, with the server's model as it was sent.
            messages: what crossed the wire, one message per client in the order of their numbers.
        """

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """The round is over: the server's model and the clients' snapshots are up to date.

        Args:
            trainer: the Trainer.
            pl_module: the federated method.
            messages: the messages that were aggregated, stage after stage; in a run that was resumed in the middle of
                the round, those of the stages since.
        """
