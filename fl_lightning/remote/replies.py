"""Validation of sites' replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.errors import FederationError
from fl_lightning.exchange import Scores
from fl_lightning.remote.envelope import Envelope
from fl_lightning.remote.members import listed, read
from fl_lightning.remote.sites import EVALUATE, TELL, TRAIN
from fl_lightning.remote.store import is_version
from fl_lightning.wire import State


def answered(client: int, reply: bytes | str) -> Envelope:
    """Return a client's reply; raise an error if it is invalid."""
    envelope = read(reply)
    if envelope.header.get("client") != client:
        raise FederationError(f"it answered as client {envelope.header.get('client')!r}.")
    return envelope


def named(clients: Sequence[int], reasons: Mapping[int, str]) -> str:
    """Format missing clients with the reasons."""
    return "; ".join(f"client {client}: {reasons.get(client, 'no answer')}" for client in clients[:10])


def check_reply(job: Mapping[str, Any], said: Any, sent: State) -> None:
    """Reject a malformed reply; its tensors are checked when they are aggregated."""
    if type(said) is not dict or not _FORMS[job["kind"]](said, sent):
        raise FederationError("its answer is malformed.")


def is_trained(said: Any) -> bool:
    """Return whether the header of a training's reply is well-formed."""
    if type(said) is not dict:
        return False
    version, counters = said.get("version"), said.get("counters")
    kept = type(counters) is list and len(counters) == 3 and all(type(one) is int for one in counters)
    known = version is None or (type(version) is str and is_version(version) and kept)
    return (
        known and all(type(said.get(name)) is bool for name in ("counts", "sound")) and type(said.get("samples")) is int
    )


def _is_training(said: dict[str, Any], sent: State) -> bool:
    return is_trained(said) and type(said.get("loss")) in (int, float)


def _is_evaluation(said: dict[str, Any], sent: State) -> bool:
    if said.get("scored") is not True:
        return said.get("scored") is False
    return {"loss", "total"} <= sent.keys() and all(value.shape == (1,) for value in sent.values())


def _is_anything(said: dict[str, Any], sent: State) -> bool:
    return True


_FORMS = {TRAIN: _is_training, EVALUATE: _is_evaluation, TELL: _is_anything}


def alike(found: list[Scores]) -> list[Scores]:
    """Return the scores with the most common metrics; others are dropped with a warning."""
    layouts = [tuple(sorted((name, value.dtype) for name, value in one.metrics.items())) for one in found]
    ((common, _),) = Counter(layouts).most_common(1)
    strange = [int(one.clients) for one, layout in zip(found, layouts, strict=True) if layout != common]
    if strange:
        rank_zero_warn(f"Left out the scores of clients {listed(strange)}, which have other metrics than most.")
    return [one for one, layout in zip(found, layouts, strict=True) if layout == common]
