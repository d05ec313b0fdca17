"""Client side of secure aggregation; secrets are kept in memory only, for one session.

A session has four stages (Bonawitz et al., 2017; Flower's SecAgg+ with all others as neighbours). ``setup``: the site
generates two key pairs. ``share``: it receives all public keys and sends an encrypted share of its secrets for each
other site. ``masked``: it receives the shares for it and sends its values under masks, one of its own and one in common
with each other site. ``unmask``: it sends, once, its shares of the own masks of sites that sent values and of the keys
of sites that dropped out, and never both for one site.

The site trusts the server to relay keys and shares (honest but curious). Requests that are out of order, repeated, for
too few clients, or for both kinds of shares end the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.callbacks.secure import SecureAggregationCallback
from fl_lightning.errors import FederationError
from fl_lightning.privacy.secure import Words, check_cohort
from fl_lightning.remote import keys
from fl_lightning.secret import new_key

#: The stages of a session, in order.
SETUP, SHARE, MASKED, UNMASK = STAGES = ("setup", "share", "masked", "unmask")
#: Purposes of masks.
OWN, COMMON = "own", "common"


@dataclass
class Session:
    """Secrets and knowledge of a site in one session.

    Args:
        name: the server's name of the session.
        cipher: key pair for the encryption of shares.
        mask: key pair of the masks in common with others.
        stage: the last stage answered.
        public: public mask keys of all participants, by client.
        common: shared secrets for encryption, by client.
        seed: seed of the site's own mask, until used.
        shares: received shares by client: of the seed, and of the mask key.
    """

    name: str
    cipher: keys.Pair
    mask: keys.Pair
    stage: str = SETUP
    public: dict[int, str] = field(default_factory=dict)
    common: dict[int, bytes] = field(default_factory=dict)
    seed: bytes = b""
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)


class SecureMember:
    """A site that takes part in secure aggregation.

    Args:
        client: its number.
        rules: the options approved by its operator.
    """

    def __init__(self, client: int, rules: SecureAggregationCallback) -> None:
        self.client, self.rules = client, rules
        self._session: Session | None = None
        self._stages: Mapping[str, Callable[[Session, Mapping[str, Any]], dict[str, Any]]] = {
            SHARE: self._share,
            MASKED: self._keep,
            UNMASK: self._unmask,
        }

    def answer(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a stage of a session; at ``masked``, the values come from :meth:`masked`.

        Args:
            said: name of the session, stage, and the stage's contents.
        """
        name, stage = said.get("session"), said.get("stage")
        if stage == SETUP and type(name) is str:
            self._session = Session(name, keys.new_pair(), keys.new_pair())
            return {"keys": [self._session.cipher.public, self._session.mask.public]}
        session = self._session
        if session is None or session.name != name:
            raise FederationError("This site has no such session of secure aggregation, or has ended it.")
        try:
            following = _after(session.stage)
            if stage != following:
                raise FederationError(
                    f"Stage {following!r} of secure aggregation comes next, and the server asked for {stage!r}."
                )
            session.stage = stage
            return self._stages[stage](session, said)
        except FederationError:
            self.close()
            raise
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            self.close()
            raise FederationError(f"The server's stage {stage!r} of secure aggregation is malformed.") from error

    def close(self) -> None:
        """Erase all secrets of the session."""
        self._session = None

    @property
    def clients(self) -> int:
        """Number of clients that take part in the sum."""
        return 0 if self._session is None else len(self._session.shares)

    def masked(self, values: Words) -> Words:
        """Mask the values: uniformly random to anyone without the seed of the site's own mask."""
        session = self._session
        if session is None or session.stage != MASKED or not session.seed:
            raise FederationError("No other site is left to add values up with.")
        sent = values + keys.mask(session.seed, OWN, len(values))
        for other in session.shares.keys() - {self.client}:
            common = keys.mask(keys.agreed(session.mask.private, session.public[other]), COMMON, len(values))
            sent = sent + common if self.client < other else sent - common
        session.seed = b""  # no second message under the same masks
        return sent

    def _share(self, session: Session, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return encrypted shares of the site's secrets for all others."""
        public = {int(client): (str(cipher), str(mask)) for client, (cipher, mask) in said["keys"].items()}
        check_cohort(len(public), self.rules.least)
        if public.get(self.client) != (session.cipher.public, session.mask.public):
            raise FederationError("The server named other keys of this site than its own.")
        if len({key for pair in public.values() for key in pair}) != 2 * len(public):
            raise FederationError("The server named one key twice.")
        session.public = {client: mask for client, (_, mask) in public.items()}
        session.seed = new_key()
        threshold, order = self.rules.needed(len(public)), sorted(public)
        seeds, numbers = (
            keys.split(secret, threshold, len(public))
            for secret in (session.seed, keys.number_of(session.mask.private))
        )
        written = {}
        for client, seed, number in zip(order, seeds, numbers, strict=True):
            if client == self.client:
                session.shares[client] = seed, number
                continue
            session.common[client] = keys.agreed(session.cipher.private, public[client][0])
            written[str(client)] = keys.locked(session.common[client], self.client, client, seed, number)
        return {"shares": written}

    def _keep(self, session: Session, said: Mapping[str, Any]) -> dict[str, Any]:
        """Store the shares for this site; their senders are the sites with common masks."""
        written = {int(client): str(text) for client, text in said["shares"].items()}
        if not written.keys() <= session.common.keys():
            raise FederationError("The server passed on shares of clients that take no part.")
        self._check_enough(session, len(written) + 1)
        for client, text in written.items():
            session.shares[client] = keys.unlocked(session.common[client], client, self.client, text)
        return {}

    def _unmask(self, session: Session, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return shares of the seeds of clients that sent values and of the keys of those that dropped out, once."""
        sent, dropped = ([int(client) for client in said[name]] for name in ("sent", "dropped"))
        both = sorted(set(sent) & set(dropped))
        if both:
            raise FederationError(
                f"The server asked for both shares of client {both[0]}, which would take off its masks."
            )
        if session.seed or sorted(sent + dropped) != sorted(session.shares) or self.client not in sent:
            raise FederationError("The server asked for shares of other clients than those that take part.")
        self._check_enough(session, len(sent))
        self.close()
        return {
            "seeds": {str(client): session.shares[client][0].hex() for client in sent},
            "numbers": {str(client): session.shares[client][1].hex() for client in dropped},
        }

    def _check_enough(self, session: Session, there: int) -> None:
        """Raise an error if too few clients are left."""
        check_cohort(there, self.rules.least)
        check_enough(there, len(session.public), self.rules)


def check_enough(there: int, clients: int, rules: SecureAggregationCallback) -> None:
    """Raise an error if fewer clients are left than can restore the masks of the others.

    Args:
        there: number of clients left.
        clients: number of clients at the start.
        rules: the options.
    """
    needed = rules.needed(clients)
    if there < needed:
        raise FederationError(
            f"Secure aggregation of {clients} clients needs {needed} of them to its end, and has {there}."
        )


def _after(stage: str) -> str:
    """Return the next stage."""
    return STAGES[min(STAGES.index(stage) + 1, len(STAGES) - 1)]
