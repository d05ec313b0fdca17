"""Client-level membership: did a client take part in a round, or in training at all?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.callbacks.attacks import AttackCallback, federated, protection
from fl_lightning.callbacks.defence import DifferentialPrivacyCallback
from fl_lightning.metrics import membership_intervals, membership_summary
from fl_lightning.module import FederatedModule
from fl_lightning.parties import Setting
from fl_lightning.privacy.data import AttackData, attack_data
from fl_lightning.privacy.defence import central_std, clipped, noised
from fl_lightning.privacy.figures import roc_figure
from fl_lightning.privacy.participation import FEWEST, Taught, participation_scores, teach
from fl_lightning.privacy.rehearsal import rehearse, update
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.wiretap import Run, Wire, intercept
from fl_lightning.ranges import AtLeast, Count
from fl_lightning.secret import SecretStream, new_key
from fl_lightning.wire import Message, State, message_weights, weighted_mean

#: The view of the global model.
GLOBAL = "other_client"


class Observed(NamedTuple):
    """A round as observed by adversaries, and the clients that took part."""

    number: int
    received: State
    """The message that clients received."""
    changes: dict[str, Tensor]
    """The change by view, flattened."""
    cohort: list[int]


class _Rehearsed(NamedTuple):
    """Updates that clients would have sent in a round, shapes (clients, D) and (references, D)."""

    own: Tensor
    strangers: Tensor
    references: Tensor


class _Compared(NamedTuple):
    """Scores of clients and of strangers in a round, shape (clients,), and of the adversary's own updates."""

    cohort: list[int]
    own: Tensor
    strangers: Tensor
    taught: Taught


class ClientMembershipCallback(AttackCallback):
    """Infers whether clients took part in a round, or in training at all.

    The adversary has samples of the client (``own``: an upper bound) or others of the same classes (``like``), trains
    the update that the client would have sent, and searches for it in the change of the global model (view
    ``other_client``) or in the mean of the round's messages (view ``sums``, secure aggregation). It compares with
    updates of rows that no client trains on. Views that see messages of single clients are refused, because they
    already know who took part.

    ``round`` tests every observed round and client; its null distribution is that of clients that did not take part in
    the round, so it needs rounds without some clients. ``training`` tests whether a client took part in any of the
    observed rounds; its null distribution is that of strangers, the same number of clients made of rows that no client
    trains on, with the same class counts. Reported are AUROC, true positive rates at false positive rates of 1% and
    0.1% (NaN with too few negatives) with 95% intervals, and ``accuracy`` and ``f1`` at a threshold that the adversary
    learns by adding its own updates to the change. Intervals treat all pairs of round and client as independent.

    With a TensorBoard logger, the ROC curves are logged as the image ``client_membership/<view>``. All raw scores are
    saved as ``client_membership.pt`` in the log folder. After a test, there are no observed rounds: the attack then
    requests the clients' updates of the next round and composes rounds of these.

    Args:
        views: the adversaries, of ``other_client`` and ``sums``.
        references: number of the adversary's own updates in every round.
        samples: maximum number of rows of a client.
        clients: number of attacked clients, chosen at random; None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        memory: number of observed rounds, the last ones.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "client_membership"
    metric_prefix = "client_mia"
    by = "auroc"
    pick = "shadow_auroc"
    allowed = (GLOBAL, "sums")
    reason = "it sees who sends a message, so that nothing is left to infer"

    def __init__(
        self,
        views: Sequence[str] = (GLOBAL,),
        references: Annotated[int, AtLeast(FEWEST)] = 16,
        samples: Count = 1000,
        clients: Count | None = 20,
        every: Count | None = None,
        memory: Count = 5,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, memory, group, folder)
        self.references, self.samples = references, samples
        self.observed: deque[Observed] = deque(maxlen=memory)
        #: Raw scores of the last attack: kind, scores and whether the client took part.
        self.scored: list[dict[str, Any]] = []
        self._before: dict[str, State] = {}
        self._sums: Tensor | None = None
        self._numbers = (0, 0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start observing."""
        super().setup(trainer, pl_module, stage)
        self.wire = Wire(memory=1)  # messages of single clients are not used
        if stage == "fit":
            self.observed.clear()

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Record the model before the round."""
        self._before = {"server": _copied(federated(pl_module).server_state())}
        self._sums = None

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Record the received message, by stage and round."""
        for when in ("round", "stage"):
            if when not in self._before:
                self._before[when] = _copied(message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Record that a message was sent, but not its content."""
        self.wire.note(client, {})

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Record the mean of a stage; changes of several stages are summed."""
        module, received = federated(pl_module), self._before.pop("stage", None)
        if received is not None and messages and messages[0].tensors:
            mean = weighted_mean(messages, message_weights(messages, module.weighting))
            change = update(module, received, mean)
            self._sums = change if self._sums is None else self._sums + change

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Record the change, and attack every ``every`` rounds."""
        module, before = federated(pl_module), self._before
        if "round" in before and self._sums is not None:
            took = sorted({module.client_of(message.client) for message in messages})
            changes = {GLOBAL: update(module, before["server"], module.server_state()), "sums": self._sums}
            self.observed.append(Observed(trainer.current_epoch, before["round"], changes, took))
        self._before, self._sums = {}, None
        super().on_round_end(trainer, pl_module, messages)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack rounds composed of the clients' next updates."""
        module = federated(pl_module)
        everybody = [*range(module.federation.num_clients)]
        run = intercept(module, everybody, protection(trainer, pl_module))
        self.observed.clear()
        self.observed.extend(self._made_up(trainer, module, run))
        self.reports.pop(module.completed_rounds, None)
        self._carry_out(trainer, pl_module, run)

    def _made_up(self, trainer: Trainer, module: FederatedModule, run: Run) -> list[Observed]:
        """Compose rounds with cohorts drawn from all clients, of the size of the next cohort."""
        rng = seeding.stream(module.seed, "attack.cohorts")
        clients = [client for client in run.clients if run.wire.exchanged(client)]
        if not clients:
            return []
        size = len(module.cohort(module.completed_rounds))
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        central = [c for c in callbacks if isinstance(c, DifferentialPrivacyCallback) and c.where == "central"]
        received = run.wire.exchanged(clients[0])[-1][0]
        found = []
        for _ in range(self.memory if size < len(clients) else 1):
            cohort = sorted(clients[place] for place in seeding.permutation(rng, len(clients))[:size].tolist())
            messages = [Message(c, run.wire.sent[c][-1], len(module.federation.train[c])) for c in cohort]
            for defence in central:
                std = central_std(defence.noise_multiplier, defence.clip, messages, module.weighting)
                for message in messages:
                    bounded = clipped(message.tensors, received, defence.clip)
                    message.tensors = noised(bounded, std, SecretStream(new_key()).normal)
            mean = weighted_mean(messages, message_weights(messages, module.weighting))
            change = update(module, received, mean)
            found.append(Observed(module.completed_rounds, received, {GLOBAL: change, "sums": change}, cohort))
        return found

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Simulate the clients' updates and search for them."""
        module = run.module
        if not self.observed:
            return []
        order = seeding.permutation(seeding.stream(module.seed, "attack.clients"), module.federation.num_clients)
        asked = sorted(order[: self.clients].tolist())
        data = attack_data(module.federation, asked, module.seed, self.samples)
        references = self._dealt(data, module)
        found: dict[str, list[_Compared]] = {}
        for one in run.each([*self.observed]):
            made = self._rehearsed(module, one, data, asked, references)
            for view in (view.name for view in self.views):
                change = one.changes[view].to(made.own)
                own, strangers = (
                    participation_scores(change, made_of, made.references).cpu()
                    for made_of in (made.own, made.strangers)
                )
                taught = teach(change, made.references, 1 / max(1, len(one.cohort)))
                found.setdefault(view, []).append(_Compared(one.cohort, own, strangers, taught))
        self._numbers = len(asked), len(references)
        self.scored = [answer for view, rounds in found.items() for answer in _answers(view, rounds, asked)]
        self._show(trainer, module.completed_rounds)
        return [_row(one) for one in self.scored]

    def notes(self) -> dict[str, Any]:
        """Return the numbers of observed rounds and updates."""
        took = [len(one.cohort) for one in self.observed]
        return {
            "clients asked about": self._numbers[0],
            "observed rounds, and clients that took part in each": f"{len(took)}, {', '.join(map(str, took))}",
            "updates of the adversary's own in each round": self._numbers[1],
        }

    def _dealt(self, data: AttackData, module: FederatedModule) -> list[Tensor]:
        """Divide the adversary's rows into clients of the federation's usual size, or smaller if there are too few."""
        size = min(self.samples, int(module.federation.train.sizes.median()))
        size = max(1, min(size, len(data.pool) // (2 * FEWEST)))
        number = max(FEWEST, min(self.references, len(data.pool) // size))
        rows = data.pool[seeding.permutation(seeding.stream(module.seed, "attack.references"), len(data.pool))]
        return [*torch.split(rows[: number * size], size)]

    def _rehearsed(
        self, module: FederatedModule, one: Observed, data: AttackData, asked: list[int], references: list[Tensor]
    ) -> _Rehearsed:
        rows = [*(data.members[c] for c in asked), *(data.nonmembers[c] for c in asked), *references]
        received = {name: value.to(module.device) for name, value in one.received.items()}
        setting = Setting(one.number, module.setting().rounds, clients=module.federation.num_clients)
        sent = rehearse(module, module.federation, received, rows, setting, "attack.participation")
        every = torch.stack([update(module, received, message) for message in sent])
        return _Rehearsed(*torch.split(every, [len(asked), len(asked), len(references)]))

    def _show(self, trainer: Trainer, rounds: int) -> None:
        for view in dict.fromkeys(one["view"] for one in self.scored):
            curves = {
                f"{one['variant']}, {one['assumption']}": (one["scores"], one["members"])
                for one in self.scored
                if one["view"] == view
            }
            self.picture(
                trainer, f"client_membership/{view}", partial(roc_figure, curves, found="clients found"), rounds
            )
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(self.scored, Path(folder) / "client_membership.pt")

    def state_dict(self) -> dict[str, Any]:
        """Observed rounds, so that a resumed run is attacked like an uninterrupted one."""
        return {**super().state_dict(), "observed": [one._asdict() for one in self.observed]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        super().load_state_dict(state_dict)
        self.observed = deque((Observed(**one) for one in state_dict["observed"]), maxlen=self.memory)


def _answers(view: str, rounds: Sequence[_Compared], asked: Sequence[int]) -> list[dict[str, Any]]:
    """Return scores and truth of every kind of test."""
    took = torch.tensor([[client in one.cohort for client in asked] for one in rounds])
    own, strangers = (torch.stack([getattr(one, name) for one in rounds]) for name in ("own", "strangers"))
    line = sum(one.taught.threshold for one in rounds) / len(rounds)
    strength = sum(one.taught.auroc for one in rounds) / len(rounds)
    ways: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    if bool(took.any() & ~took.all()):
        ways["round", "own"] = own.flatten(), took.flatten()
        ways["round", "like"] = strangers.flatten(), took.flatten()
    ever = took.any(0)
    if bool(ever.any()):
        flags = torch.arange(int(ever.sum()) + len(asked)) < int(ever.sum())
        ways["training", "own"] = torch.cat((own.amax(0)[ever], strangers.amax(0))), flags
    return [
        {
            "view": view,
            "assumption": assumption,
            "variant": variant,
            "scores": scores,
            "members": flags,
            "threshold": line,
            "shadow_auroc": strength,
        }
        for (variant, assumption), (scores, flags) in ways.items()
    ]


def _row(one: dict[str, Any]) -> Row:
    scores, members = one["scores"], one["members"]
    how = {key: one[key] for key in ("view", "assumption", "variant")}
    measures = membership_summary(scores, members, one["threshold"])
    found = {name: float(value) for name, value in measures.items()} | membership_intervals(scores, members)
    numbers = {"inside": float(members.sum()), "outside": float((~members).sum())}
    return {**how, "client": -1, "group": "", **found, "shadow_auroc": one["shadow_auroc"], **numbers}


def _copied(state: State) -> State:
    return {name: value.detach().clone() for name, value in state.items()}
