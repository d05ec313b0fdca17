"""Base of the methods with factorised layers: a dictionary on the server, a selection at home."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.engine import Batch, Gradient, Phase, Plan, Update
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.methods.lib.adaptation import fit_entries, fitting
from fl_lightning.methods.settings import FactorEvaluation
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.nets.factorized import FactorizedLayer, default_factors, factorize, factorized_layers
from fl_lightning.parties import SANITY_CHECK, LocalData, Me, Reply
from fl_lightning.snapshots import DiskSnapshotStore
from fl_lightning.wire import Message, State, Weighting, prefixed, without

#: Prefix of what a client keeps of the last message it received.
RECEIVED = "received."
#: Purpose of what clients that never trained work out.
ADAPTED = "adapted"


class FactorizedModule(FederatedModule, ABC):
    """A federation that shares factors, of which every client makes its own selection.

    The server holds ``wa``, ``wb`` and ``r`` of every factorised layer and all other weights; messages are exactly
    these. What a client selects by (its *own entries*, of which a subclass names the kinds) lies in its snapshot and
    nowhere else. A layer's buffer ``mask`` is where the selection enters the net; it is derived, neither sent nor kept.

    Own entries take plain SGD steps: momentum, weight decay and clipping are for the weights.

    Args:
        net: the network, dense or with factorised layers.
        never_sampled: how a client that never trained is evaluated; ``adapt`` first fits its own entries, alone, to its
            training data.
        evaluation: how clients are evaluated; see :class:`~fl_lightning.methods.settings.FactorEvaluation`.
        weighting: weigh clients by their number of samples, or all the same.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    #: Kinds of own entries that a client has for each factorised layer.
    kinds: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        net: FedNet,
        never_sampled: str = "adapt",
        evaluation: FactorEvaluation = FactorEvaluation(),  # noqa: B008 - frozen
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, weighting=weighting, **kwargs)
        self.never_sampled = never_sampled
        self.evaluated: FactorEvaluation = FactorEvaluation.of(evaluation, "evaluation")
        self.factors: dict[str, int] = {}
        #: How many factors have been trained; those that were added since count for nobody yet.
        self.known: dict[str, int] = {}

    def asked_factors(self, factors: dict[str, int] | None) -> dict[str, int]:
        """Numbers of factors by layer as asked for; of a dense net, where nothing is asked, the default ones."""
        return default_factors(self.net) if not factors and not self.layers else dict(factors or {})

    def factorise(self, factors: Mapping[str, int], effective: Mapping[str, float]) -> None:
        """Factorise the named layers of the net, besides those that are factorised already.

        Args:
            factors: number of factors by layer; empty if the net came factorised.
            effective: how many of a layer's factors are active on average, for their initial scale; else all.
        """
        rng = seeding.stream(self.seed, "factors")
        self.net = factorize(self.net, factors, effective, _generator(rng))
        self._note_factors()
        if not self.factors:
            raise FederationError(
                f"{type(self).__name__} factorises dense and convolution layers before the last dense one, of which "
                f"{type(self.net).__name__} has none: use another net, or name layers, such as factors={{'head': 6}}."
            )

    # client: what a method says

    @abstractmethod
    def initial(self, layer: str, number: int) -> State:
        """Own entries of a layer of so many factors that every client starts with, by kind, each of shape (F,)."""

    @abstractmethod
    def training_masks(self, state: State, noise: State) -> State:
        """The masks of one local step, by the names of the layers' mask buffers."""

    @abstractmethod
    def penalty(self, state: State, batch: Batch) -> Tensor:
        """Term that the local objective adds to the loss for the selection, 0-dim."""

    @abstractmethod
    def selection(self, own: State, rng: np.random.Generator) -> Tensor:
        """The mask that a client with these own entries of a layer is evaluated with."""

    @abstractmethod
    def own_step(self, name: str, value: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """An own entry after one SGD step at a learning rate."""

    def unfitted_masks(self, counts: Mapping[str, int]) -> State:
        """Masks for clients that never trained and are not adapted. Default: every factor is used."""
        return {f"{layer}.mask": torch.ones_like(self.layers[layer].r[:1]).expand(n) for layer, n in counts.items()}

    def noise(self, rng: np.random.Generator, steps: int, counts: Mapping[str, int]) -> State:
        """Noise of some steps of an epoch for layers of so many factors. Default: none."""
        return {}

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """The noise of the selection."""
        return self.noise(rng, steps, self.factors)

    # client: names

    @property
    def layers(self) -> dict[str, FactorizedLayer]:
        """The factorised layers by name."""
        return factorized_layers(self.net)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of a client's own entries, ``layer.kind``."""
        return tuple(f"{layer}.{kind}" for layer in self.factors for kind in self.kinds)

    def own_start(self, counts: Mapping[str, int]) -> State:
        """The own entries that every client starts with."""
        return {f"{m}.{kind}": value for m, n in counts.items() for kind, value in self.initial(m, n).items()}

    def counts(self, received: State) -> dict[str, int]:
        """Numbers of factors by layer in a dictionary that was received."""
        return {layer: len(received[f"{layer}.r"]) for layer in self.factors}

    def own(self, private: State, layer: str) -> State:
        """A layer's own entries by kind, out of a client's private ones."""
        return {kind: private[f"{layer}.{kind}"] for kind in self.kinds}

    def is_private(self, name: str) -> bool:
        """Masks stay with the client."""
        return name.endswith(".mask") and name.removesuffix(".mask") in self.factors

    # client: local training

    def enter(self, received: State, me: Me) -> State:
        """The received dictionary and the client's own entries; for factors it never saw, the initial ones."""
        state = super().enter(received, replace(me, private=without(RECEIVED, me.private)))
        for name, value in self.own_start(self.counts(received)).items():
            state[name] = widened(state[name], value) if name in state else value
        return state

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """The loss under the selection of this step, and the selection's penalty."""
        loss, buffers = self.selected_loss(state, batch)
        return loss + self.penalty(state, batch), buffers

    def selected_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """The loss under the selection of this step."""
        masks = self.training_masks(state, batch.noise)
        loss, buffers = super().client_loss({**state, **masks}, batch)
        return loss, {name: value for name, value in buffers.items() if name not in masks}

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """One SGD step; the penalty, which concerns own entries alone, is left out where they are not trained."""
        own = set(self.own_names).intersection(phase.trainable)
        objective = self.client_loss if own else self.selected_loss
        grads, loss, buffers = gradient(lambda s: objective(s, batch), state, phase.trainable)
        lr, chosen = self.rate(batch), [name for name in phase.trainable if name in own]
        steps = {name: self.own_step(name, state[name], grads.pop(name), lr) for name in chosen}
        return Update(loss, grads, {**buffers, **steps})

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """The dictionary goes up; own entries stay, with the received dictionary if it is to be used offline."""
        up, keep = super().leave(state, received, me)
        kept = {name: value for name, value in (keep or {}).items() if not self.is_private(name)}
        kept |= {name: state[name] for name in self.own_names}
        return Reply(up, kept | (prefixed(RECEIVED, received) if self.evaluated.dictionary == "cached" else {}))

    # client: personal models

    def settle(self, received: Sequence[State], mes: Sequence[Me]) -> Sequence[State]:
        """Clients that never trained fit their own entries, all together; kept until the dictionary changes."""
        new = [i for i, me in enumerate(mes) if not self.selects(me) and me.stage != SANITY_CHECK]
        if self.never_sampled != "adapt" or not new:
            return super().settle(received, mes)
        todo = [i for i in new if mes[i].memory.get(ADAPTED, received[i]) is None]
        if any(mes[i].data is None for i in todo):
            client = mes[todo[0]].client
            raise FederationError(f"Client {client} never trained: fit its selection with adapt(federation, {client}).")
        dictionaries, data = [received[i] for i in todo], [mes[i].data for i in todo]
        fitted = self._fit_own(dictionaries, data, self.evaluated.adapt_epochs) if todo else []
        for i, entries in zip(todo, fitted, strict=True):
            mes[i].memory.put(ADAPTED, received[i], entries)
        return [(i in new and mes[i].memory.get(ADAPTED, received[i])) or {} for i in range(len(mes))]

    def selects(self, me: Me) -> bool:
        """Whether a client has own entries."""
        return self.own_names[0] in me.private

    def personal(self, received: State, me: Me) -> State:
        """The dictionary under the client's own selection.

        Factors that were added after the client last trained are not used, so it computes what it did.
        """
        state, counts = super().personal(received, replace(me, private={})), self.counts(received)
        for name, value in me.private.items():
            target = name.removeprefix(RECEIVED)
            if target in state:
                state[target] = widened(value, state[target])
        masks = self.masks(me.private, me.client, counts) if self.selects(me) else self.unfitted_masks(counts)
        return {**state, **masks}

    def adapt(self, federation: Federation, client: int, epochs: int | None = None) -> State:
        """Fit a new client's own entries to its training data, with the dictionary frozen; nothing leaves the client.

        Works on a method that :meth:`load_from_checkpoint` returned as on one that has just been trained. Nothing is
        stored: pass the result to :meth:`personalise` for the client's model, or as
        ``method.snapshots[number] = ClientSnapshot(private)`` to let the client take part under a number of its own.

        Args:
            federation: data that holds the client, such as ``datamodule.federation``.
            client: its number in that data.
            epochs: passes over its data; None takes ``adapt_epochs``.

        Returns:
            The client's private entries.
        """
        data = LocalData(federation.to(self.device), client)
        epochs = self.evaluated.adapt_epochs if epochs is None else epochs
        return self._fit_own([self.evaluation_down(client)], [data], epochs)[0]

    def personalise(self, private: State, client: int = 0) -> State:
        """The model of a client with these private entries, such as those that :meth:`adapt` returns.

        Args:
            private: the client's private entries.
            client: whose stream a sampled selection is drawn from.
        """
        return self.personal(self.evaluation_down(client), Me(client, client, seed=self.seed, private=private))

    def _fit_own(self, received: Sequence[State], data: Sequence[LocalData], epochs: int) -> list[State]:
        counts = self.counts(received[0])
        with torch.inference_mode(False):  # tensors made in it cannot be trained
            states = [{**self.at_first(), **message, **self.own_start(counts)} for message in received]
        plan = fitting(self, self.own_names, epochs)
        return fit_entries(self, plan if counts == self.factors else _Fewer(plan, counts), data, states)

    def masks(self, private: State, client: int, counts: Mapping[str, int]) -> State:
        """The masks that own entries select, 0 for factors that they do not know."""
        masks: State = {}
        for layer, number in counts.items():
            rng = seeding.stream(self.seed, f"evaluation.{layer}", client=client)
            mask = self.selection(self.own(private, layer), rng)
            masks[f"{layer}.mask"] = widened(mask, torch.zeros_like(self.layers[layer].mask[:1]).expand(number))
        return masks

    # adversary

    def private_start(self) -> State:
        """The own entries."""
        return self.own_start(self.factors)

    def assumptions(self) -> dict[str, State]:
        """Every factor is used."""
        return {"ones": {f"{name}.mask": torch.ones_like(layer.mask) for name, layer in self.layers.items()}}

    def assume(self, state: State, private: State) -> State:
        """The dictionary of ``state`` under these masks or own entries."""
        known = set(self.own_names) <= private.keys()
        return super().assume(state, private) | (self.masks(private, 0, self.factors) if known else {})

    def betrayed(self, received: State, message: State) -> State:
        """The masks, read off the factors: those that a client uses move, those that it does not use stay.

        The gradient of a left factor wa_k is b_k r_k times a vector that wb_k enters, and that of a right factor has
        wa_k in its place. How far both moved, over the strength and the size of the other, is therefore in proportion
        to b_k, but for the direction of the gradient; factors that moved further than average are taken to be used.
        """
        masks: State = {}
        for layer in self.factors:
            left, right, strength = (received[f"{layer}.{part}"] for part in ("wa", "wb", "r"))
            by_left = _sizes((message[f"{layer}.wa"] - left).T) / _sizes(right)
            by_right = _sizes(message[f"{layer}.wb"] - right) / _sizes(left.T)
            moved = ((by_left * by_right).sqrt() / strength.abs()).nan_to_num(0.0, 0.0)
            usual = moved[moved >= moved.mean()].mean()
            masks[f"{layer}.mask"] = (moved / usual).clamp(max=1.0) if usual > 0 else torch.ones_like(moved)
        return masks

    # server

    def evaluation_down(self, client: int) -> State:
        """The dictionary; factors that were added since it was last trained change nobody's model."""
        state = super().evaluation_down(client)
        if self.known != self.factors:
            for layer, number in self.known.items():
                left, right, strength = (f"{layer}.{part}" for part in ("wa", "wb", "r"))
                state |= {
                    left: state[left][:, :number],
                    right: state[right][:number],
                    strength: state[strength][:number],
                }
        return state

    def message_down(self, client: int) -> State:
        """The whole dictionary."""
        state = self.server_state()
        return {name: state[name] for name in self.shared_names if not self.resets(name)}

    def aggregate(self, messages: list[Message]) -> State:
        """The mean dictionary, of which all factors have been trained now."""
        self.known = dict(self.factors)
        return super().aggregate(messages)

    def server_extras(self) -> dict[str, Any]:
        """How many factors have been trained."""
        return {"known": dict(self.known)}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Bring it back."""
        self.known = dict(extras.get("known", self.factors))

    # growth

    def grow(self, extra: int | Mapping[str, int]) -> None:
        """Append factors to the dictionary, for clients to come; call it between two runs.

        All clients compute what they did until the dictionary is trained again; then those that train, and those that
        never did, may select new factors too.

        Args:
            extra: how many, for every factorised layer or by layer.
        """
        if self.is_fitting:
            raise FederationError("The dictionary cannot grow within a run: grow it before fit.")
        if isinstance(self.snapshots, DiskSnapshotStore):
            raise FederationError("A store on disk has rows of one size, which cannot grow: leave store out.")
        amounts = dict.fromkeys(self.factors, extra) if isinstance(extra, int) else dict(extra)
        unknown = sorted(amounts.keys() - self.factors.keys())
        if unknown:
            raise FederationError(
                f"There is no factorised layer {unknown[0]!r}: choose among {', '.join(self.factors)}."
            )
        for layer, amount in amounts.items():
            rng = seeding.stream(self.seed, f"factors.{layer}", round=self.factors[layer])
            self.layers[layer].grow(amount, _generator(rng))
        known = dict(self.known)
        self._note_factors()
        self.known = known

    def _note_factors(self) -> None:
        """Keep count, also for ``load_from_checkpoint``."""
        self.factors = {name: layer.factors for name, layer in self.layers.items()}
        self.known = dict(self.factors)
        self.hparams["factors"] = dict(self.factors)


class _Fewer(Plan):
    """A plan for a dictionary of fewer factors than the method has, in this process only."""

    for_worker = None  # type: ignore[assignment]

    def __init__(self, plan: Plan, counts: Mapping[str, int]) -> None:
        vars(self).update(vars(plan))
        self.counts = counts

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """The noise for so many factors."""
        method: Any = self.method
        found: State = method.noise(rng, steps, self.counts)
        return found


def widened(value: Tensor, target: Tensor) -> Tensor:
    """``target`` with its leading part, in every dimension, replaced by ``value``; at the target's precision."""
    if value.shape == target.shape:
        return value.to(target)
    whole = target.clone()
    whole[tuple(slice(size) for size in value.shape)] = value.to(target)
    return whole


def _generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**31)))


def _sizes(factors: Tensor) -> Tensor:
    """The norm of every factor, shape (F,)."""
    return factors.flatten(1).square().sum(1).sqrt()
