"""Views: what adversaries see of a client, and the models they can derive from it.

A view turns a run into candidates by the adversary's assumption about unseen entries: each is a list of models (states
of the net), one per message. An attack is carried out with all of them, and the strongest one counts. Views use only
the contract of :class:`~fl_lightning.module.FederatedModule`: ``revealed``,
``assumptions``, ``private_start``, ``assume`` and ``betrayed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.methods.lib.adaptation import fit_entries, fitting
from fl_lightning.module import FederatedModule
from fl_lightning.parties import LocalData
from fl_lightning.privacy.wiretap import Run
from fl_lightning.wire import State, is_finite

#: Candidates by assumption.
Candidates = dict[str, list[State]]
#: Number of epochs on the adversary's own data to guess private entries.
GUESS_EPOCHS = 5


class View(ABC):
    """Base class of views: an adversary's knowledge about one client.

    All adversaries know the architecture, the method and its settings, and the common initial weights.
    """

    name: ClassVar[str]
    #: The threat model in a sentence.
    sees: ClassVar[str]
    #: Whether it sees only models of all clients together.
    whole: ClassVar[bool] = False
    #: Whether it uses the means of rounds.
    sums: ClassVar[bool] = False

    @abstractmethod
    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the adversary's models by assumption; empty if it sees nothing.

        Args:
            run: the run.
            client: the attacked client.
            reference: the adversary's own data, as a federation of one client; None leaves the guess out.
        """


class Outsider(View):
    """An eavesdropper with one intercepted up message."""

    name = "outsider"
    sees = "one intercepted up message of the client"

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the last message, completed by every assumption."""
        return _completed(run, client, self.name, _revealed(run, client)[-1:], reference)


class Server(View):
    """An honest but curious server, with every message up and down; the last ones (``memory``) are used."""

    name = "server"
    sees = "every message to and from the client, the last ones of which are used together"

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return all messages, completed by every assumption and by inference from the shared entries."""
        seen = _revealed(run, client)
        found = _completed(run, client, Outsider.name, seen, reference)
        exchanged = run.wire.exchanged(client)
        betrayed = [run.module.betrayed(received, sent) if received else {} for received, sent in exchanged]
        if betrayed and all(betrayed):
            bare = ({**run.module.server_state(), **one} for one in seen)
            found["traces"] = [run.module.assume(*each) for each in zip(bare, betrayed, strict=True)]
        return found


class OtherClient(View):
    """Another participant, with its received global model."""

    name = "other_client"
    whole = True
    sees = "the global model that the server sends to another client"

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the models that another client receives, completed by every assumption."""
        module = run.module
        clients = module.federation.num_clients
        other = next((c for c in range(clients) if c != client), client)
        message = module.message_down(other)
        if not message:
            return {}
        begun = module.enter(message, module.simulation.me(other, module.setting()))
        known = {name: begun[name] for name in module.shared_names if name in message or name in module.trainable_names}
        return _completed(run, client, self.name, [known], reference)


class Insider(View):
    """Not an adversary but an upper bound for one message: knows the private state too."""

    name = "insider"
    sees = "the client's last up message and its private state: a bound of what one message can tell"

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the client's trained model and the one it is evaluated with."""
        module, private = run.module, run.private[client]
        seen = _revealed(run, client)
        base = {**module.server_state(), **(seen[-1] if seen else {})}
        return {"own": [module.assume(base, private)], "personal": [module.personal_state(client)]}


class Sums(View):
    """A server with secure aggregation, with the mean of every round; the last ones are used."""

    name = "sums"
    sees = "the mean of all clients' messages of a round (secure aggregation), and what it sends"
    whole = sums = True

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the means, completed by every assumption."""
        return _completed(run, client, self.name, [run.module.revealed(mean) for mean in run.wire.means], reference)


class Colluding(View):
    """A server with secure aggregation that colludes with all clients but one."""

    name = "colluding"
    sees = "the mean of a round (secure aggregation) and the messages of all other clients, which collude with it"
    sums = True

    def observe(self, run: Run, client: int, reference: Federation | None = None) -> Candidates:
        """Return the means without the colluding clients, completed by every assumption."""
        left = run.wire.left.get(client, ())
        return _completed(run, client, self.name, [run.module.revealed(message) for message in left], reference)


VIEWS: dict[str, type[View]] = {view.name: view for view in (Outsider, Server, OtherClient, Insider, Sums, Colluding)}


def make_views(names: Sequence[str]) -> list[View]:
    """Return views by name."""
    unknown = [name for name in names if name not in VIEWS]
    if unknown or not names:
        given = repr(unknown[0]) if unknown else "none"
        raise FederationError(f"There is no view {given}: choose among {', '.join(VIEWS)}.")
    return [VIEWS[name]() for name in names]


def _revealed(run: Run, client: int) -> list[State]:
    """Return the models in the client's messages; empty if nothing is sent."""
    told = [run.module.revealed(message) for _, message in run.wire.exchanged(client)]
    if any(not one for one in told):
        kind = type(run.module).__name__
        raise FederationError(f"The messages of {kind} name no entry of the net: {kind}.revealed must translate them.")
    return told


def _completed(run: Run, client: int, key: str, seen: list[State], reference: Federation | None) -> Candidates:
    """Complete the seen entries by assumptions, or by a guess fitted to the adversary's own data."""
    if not seen:
        return {}
    module = run.module
    bare = [{**module.server_state(), **one} for one in seen]
    found = {name: [module.assume(b, rest) for b in bare] for name, rest in module.assumptions().items()}
    if reference is not None and module.private_start():
        if (key, client) not in run.guesses:
            run.guesses[key, client] = _guess(module, bare[-1], reference)
        found["guess"] = [module.assume(b, run.guesses[key, client]) for b in bare]
    return found


def _guess(module: FederatedModule, state: State, reference: Federation) -> State:
    """Fit the private entries to the adversary's data, given the seen ones; use initial entries on divergence."""
    start = module.private_start()
    plan = fitting(module, tuple(start), GUESS_EPOCHS)
    (found,) = fit_entries(module, plan, [LocalData(reference, 0)], [{**state, **start}])
    return found if is_finite(found) else start
