"""Base of methods with factorised layers: a shared dictionary and private selections."""

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

#: Prefix of entries kept from the last received message.
RECEIVED = "received."
#: Purpose of selections fitted for clients that never trained.
ADAPTED = "adapted"


class FactorizedModule(FederatedModule, ABC):
    """Base class of methods with shared factors, of which every client selects its own.

    The server holds ``wa``, ``wb`` and ``r`` of every factorised layer and all other weights; messages contain exactly
    these. A client's selection (its *own entries*, of kinds given by the subclass) is stored in its snapshot only. The
    selection enters the net through a layer's buffer ``mask``, which is derived and neither sent nor stored.

    Own entries take plain SGD steps; momentum, weight decay and clipping apply to the weights only.

    Args:
        net: the network, dense or with factorised layers.
        never_sampled: how to evaluate a client that never trained; ``adapt`` first fits only its own entries to its
            training data.
        evaluation: options of evaluation; see :class:`~fl_lightning.methods.settings.FactorEvaluation`.
        weighting: weight clients by their number of samples or uniformly.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    #: Kinds of own entries for each factorised layer.
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
        #: Number of trained factors by layer; later ones are not used yet.
        self.known: dict[str, int] = {}

    def asked_factors(self, factors: dict[str, int] | None) -> dict[str, int]:
        """Return the requested numbers of factors by layer; for a dense net, defaults if none are given."""
        return default_factors(self.net) if not factors and not self.layers else dict(factors or {})

    def factorise(self, factors: Mapping[str, int], effective: Mapping[str, float]) -> None:
        """Factorise the named layers of the net, in addition to layers that are already factorised.

        Args:
            factors: number of factors by layer; empty for a factorised net.
            effective: mean number of active factors by layer, for the initial scale. Default: all.
        """
        rng = seeding.stream(self.seed, "factors")
        self.net = factorize(self.net, factors, effective, _generator(rng))
        self._note_factors()
        if not self.factors:
            raise FederationError(
                f"{type(self).__name__} factorises dense and convolution layers before the last dense one, of which "
                f"{type(self.net).__name__} has none: use another net, or name layers, such as factors={{'head': 6}}."
            )

    # client: hooks of the method

    @abstractmethod
    def initial(self, layer: str, number: int) -> State:
        """Return a client's initial own entries of a layer with ``number`` factors, by kind, each of shape (F,)."""

    @abstractmethod
    def training_masks(self, state: State, noise: State) -> State:
        """Return the masks of one local step, by the names of the layers' mask buffers."""

    @abstractmethod
    def penalty(self, state: State, batch: Batch) -> Tensor:
        """Return the selection's penalty term of the local objective, 0-dim."""

    @abstractmethod
    def selection(self, own: State, rng: np.random.Generator) -> Tensor:
        """Return the mask of a layer for evaluation, given the client's own entries."""

    @abstractmethod
    def own_step(self, name: str, value: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """Return an own entry after one SGD step."""

    def unfitted_masks(self, counts: Mapping[str, int]) -> State:
        """Return masks for clients that never trained and are not adapted. Default: all factors."""
        return {f"{layer}.mask": torch.ones_like(self.layers[layer].r[:1]).expand(n) for layer, n in counts.items()}

    def noise(self, rng: np.random.Generator, steps: int, counts: Mapping[str, int]) -> State:
        """Draw noise for several steps, given the numbers of factors. Default: none."""
        return {}

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw the noise of the selection."""
        return self.noise(rng, steps, self.factors)

    # client: names

    @property
    def layers(self) -> dict[str, FactorizedLayer]:
        """Factorised layers by name."""
        return factorized_layers(self.net)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of a client's own entries, ``layer.kind``."""
        return tuple(f"{layer}.{kind}" for layer in self.factors for kind in self.kinds)

    def own_start(self, counts: Mapping[str, int]) -> State:
        """Return a client's initial own entries."""
        return {f"{m}.{kind}": value for m, n in counts.items() for kind, value in self.initial(m, n).items()}

    def counts(self, received: State) -> dict[str, int]:
        """Return the numbers of factors by layer in a received dictionary."""
        return {layer: len(received[f"{layer}.r"]) for layer in self.factors}

    def own(self, private: State, layer: str) -> State:
        """Return a layer's own entries by kind from a client's private entries."""
        return {kind: private[f"{layer}.{kind}"] for kind in self.kinds}

    def is_private(self, name: str) -> bool:
        """Whether an entry is a mask."""
        return name.endswith(".mask") and name.removesuffix(".mask") in self.factors

    # client: local training

    def enter(self, received: State, me: Me) -> State:
        """Return the received dictionary and the client's own entries; initial ones for new factors."""
        state = super().enter(received, replace(me, private=without(RECEIVED, me.private)))
        for name, value in self.own_start(self.counts(received)).items():
            state[name] = widened(state[name], value) if name in state else value
        return state

    def client_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """Return the loss under this step's selection plus the selection's penalty."""
        loss, buffers = self.selected_loss(state, batch)
        return loss + self.penalty(state, batch), buffers

    def selected_loss(self, state: State, batch: Batch) -> tuple[Tensor, State]:
        """Return the loss under this step's selection."""
        masks = self.training_masks(state, batch.noise)
        loss, buffers = super().client_loss({**state, **masks}, batch)
        return loss, {name: value for name, value in buffers.items() if name not in masks}

    def descend(self, state: State, batch: Batch, phase: Phase, gradient: Gradient) -> Update:
        """Take one SGD step; the penalty, which depends on own entries only, is skipped if these are frozen."""
        own = set(self.own_names).intersection(phase.trainable)
        objective = self.client_loss if own else self.selected_loss
        grads, loss, buffers = gradient(lambda s: objective(s, batch), state, phase.trainable)
        lr, chosen = self.rate(batch), [name for name in phase.trainable if name in own]
        steps = {name: self.own_step(name, state[name], grads.pop(name), lr) for name in chosen}
        return Update(loss, grads, {**buffers, **steps})

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the dictionary; keep own entries and, with ``cached``, the received dictionary."""
        up, keep = super().leave(state, received, me)
        kept = {name: value for name, value in (keep or {}).items() if not self.is_private(name)}
        kept |= {name: state[name] for name in self.own_names}
        return Reply(up, kept | (prefixed(RECEIVED, received) if self.evaluated.dictionary == "cached" else {}))

    # client: personal models

    def settle(self, received: Sequence[State], mes: Sequence[Me]) -> Sequence[State]:
        """Fit own entries of clients that never trained, all at once; cached until the dictionary changes."""
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
        """Return the dictionary under the client's own selection.

        Factors added after the client last trained are not used, so its outputs do not change.
        """
        state, counts = super().personal(received, replace(me, private={})), self.counts(received)
        for name, value in me.private.items():
            target = name.removeprefix(RECEIVED)
            if target in state:
                state[target] = widened(value, state[target])
        masks = self.masks(me.private, me.client, counts) if self.selects(me) else self.unfitted_masks(counts)
        return {**state, **masks}

    def adapt(self, federation: Federation, client: int, epochs: int | None = None) -> State:
        """Fit a new client's own entries to its training data, with a frozen dictionary; nothing leaves the client.

        Also works on a method returned by :meth:`load_from_checkpoint`. Nothing is stored: pass the result to
        :meth:`personalise` to get the client's model, or set ``method.snapshots[number] = ClientSnapshot(private)`` to
        let the client take part under a new number.

        Args:
            federation: the client's data, such as ``datamodule.federation``.
            client: the client's number in that data.
            epochs: number of passes over its data; None takes ``adapt_epochs``.

        Returns:
            The client's private entries.
        """
        data = LocalData(federation.to(self.device), client)
        epochs = self.evaluated.adapt_epochs if epochs is None else epochs
        return self._fit_own([self.evaluation_down(client)], [data], epochs)[0]

    def personalise(self, private: State, client: int = 0) -> State:
        """Return the model of a client with these private entries, such as the result of :meth:`adapt`.

        Args:
            private: the client's private entries.
            client: the client whose random stream a sampled selection uses.
        """
        return self.personal(self.evaluation_down(client), Me(client, client, seed=self.seed, private=private))

    def _fit_own(self, received: Sequence[State], data: Sequence[LocalData], epochs: int) -> list[State]:
        counts = self.counts(received[0])
        with torch.inference_mode(False):  # inference tensors cannot be trained
            states = [{**self.at_first(), **message, **self.own_start(counts)} for message in received]
        plan = fitting(self, self.own_names, epochs)
        return fit_entries(self, plan if counts == self.factors else _Fewer(plan, counts), data, states)

    def masks(self, private: State, client: int, counts: Mapping[str, int]) -> State:
        """Return the masks of own entries; 0 for new factors."""
        masks: State = {}
        for layer, number in counts.items():
            rng = seeding.stream(self.seed, f"evaluation.{layer}", client=client)
            mask = self.selection(self.own(private, layer), rng)
            masks[f"{layer}.mask"] = widened(mask, torch.zeros_like(self.layers[layer].mask[:1]).expand(number))
        return masks

    # adversary

    def private_start(self) -> State:
        """Return the initial own entries."""
        return self.own_start(self.factors)

    def assumptions(self) -> dict[str, State]:
        """Assume that all factors are used."""
        return {"ones": {f"{name}.mask": torch.ones_like(layer.mask) for name, layer in self.layers.items()}}

    def assume(self, state: State, private: State) -> State:
        """Return the dictionary of ``state`` under these masks or own entries."""
        known = set(self.own_names) <= private.keys()
        return super().assume(state, private) | (self.masks(private, 0, self.factors) if known else {})

    def betrayed(self, received: State, message: State) -> State:
        """Infer the masks from the factors: only factors that a client uses change.

        The gradient of a left factor wa_k is b_k r_k times a vector that depends on wb_k, and likewise for right
        factors and wa_k. The change of both, divided by r_k and the norm of the other, is therefore proportional to
        b_k, up to the direction of the gradient; factors that change more than average are taken as used.
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
        """Return the dictionary without the factors added since it was last trained."""
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
        """Return the whole dictionary."""
        state = self.server_state()
        return {name: state[name] for name in self.shared_names if not self.resets(name)}

    def aggregate(self, messages: list[Message]) -> State:
        """Average the dictionaries; all factors count as trained afterwards."""
        self.known = dict(self.factors)
        return super().aggregate(messages)

    def server_extras(self) -> dict[str, Any]:
        """Return the numbers of trained factors."""
        return {"known": dict(self.known)}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the numbers of trained factors."""
        self.known = dict(extras.get("known", self.factors))

    # growth

    def grow(self, extra: int | Mapping[str, int]) -> None:
        """Append factors to the dictionary for new clients; call it between runs.

        The clients' models do not change until the dictionary is trained again; then clients that train, or never
        trained before, may select new factors.

        Args:
            extra: number of new factors, for every factorised layer or by layer.
        """
        if self.is_fitting:
            raise FederationError("The dictionary cannot grow within a run: grow it before fit.")
        if isinstance(self.snapshots, DiskSnapshotStore):
            raise FederationError("A store on disk has rows of fixed size, which cannot grow: leave store out.")
        amounts = dict.fromkeys(self.factors, extra) if isinstance(extra, int) else dict(extra)
        unknown = sorted(amounts.keys() - self.factors.keys())
        if unknown:
            raise FederationError(
                f"There is no factorised layer {unknown[0]!r}: choose one of {', '.join(self.factors)}."
            )
        for layer, amount in amounts.items():
            rng = seeding.stream(self.seed, f"factors.{layer}", round=self.factors[layer])
            self.layers[layer].grow(amount, _generator(rng))
        known = dict(self.known)
        self._note_factors()
        self.known = known

    def _note_factors(self) -> None:
        """Update the numbers of factors, also in the hyperparameters for ``load_from_checkpoint``."""
        self.factors = {name: layer.factors for name, layer in self.layers.items()}
        self.known = dict(self.factors)
        self.hparams["factors"] = dict(self.factors)


class _Fewer(Plan):
    """A plan for a dictionary with fewer factors than the method's, for this process only."""

    for_worker = None  # type: ignore[assignment]

    def __init__(self, plan: Plan, counts: Mapping[str, int]) -> None:
        vars(self).update(vars(plan))
        self.counts = counts

    def draw_noise(self, rng: np.random.Generator, steps: int) -> State:
        """Draw the noise for these numbers of factors."""
        method: Any = self.method
        found: State = method.noise(rng, steps, self.counts)
        return found


def widened(value: Tensor, target: Tensor) -> Tensor:
    """Copy ``value`` into the leading part of ``target`` in every dimension, at the target's precision."""
    if value.shape == target.shape:
        return value.to(target)
    whole = target.clone()
    whole[tuple(slice(size) for size in value.shape)] = value.to(target)
    return whole


def _generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**31)))


def _sizes(factors: Tensor) -> Tensor:
    """Return the norm of every factor, shape (F,)."""
    return factors.flatten(1).square().sum(1).sqrt()
