"""FedMA (Wang et al., 2020, "Federated Learning with Matched Averaging"): match hidden units, then average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.engine import LocalMethod, Phase, Plan, entries
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.matching import Matching
from fl_lightning.module import FederatedModule
from fl_lightning.nets import FedNet
from fl_lightning.nets.derive import check_units, derived_units
from fl_lightning.nets.units import Units, resize
from fl_lightning.parties import Me, Reply
from fl_lightning.ranges import CountOrZero, Positive
from fl_lightning.wire import Message, State, message_weights, prefixed, under

#: Maximum growth of a layer as a multiple of its initial width.
GROWTH = 2
#: Prefix of the layers that stay with a client until they are matched, and the entry with its units' permutation.
OWN, PLACES = "own.", "matching.places"


class FedMA(FederatedModule):
    """FedAvg after matching: each client's hidden units are first permuted into a common order.

    From input to output, the units of a layer are described by their incoming weights and matched
    (:class:`~fl_lightning.methods.lib.matching.Matching`), starting from the units of the received model. All tensors
    with a unit's entries are permuted with it (:class:`~fl_lightning.nets.units.Units`), then the models are averaged.

    The paper's schedule (``layerwise``) takes one round per layer: the server matches a layer, clients freeze it and
    train the layers above, which stay private until their turn.

    Args:
        net: the network: a chain of layers, one of torchvision's blocks, or one that declares its units.
        mode: ``fixed_width`` only permutes units; ``grow`` may add units, up to twice a layer's width.
        layerwise: match one layer per round and freeze it until the others have been matched.
        sigma: standard deviation of a client's unit around the matched one.
        sigma0: standard deviation of matched units around zero.
        gamma0: concentration of the prior; larger values add units more readily.
        sweeps: maximum number of rematching passes over the clients.
        kwargs: see :class:`~fl_lightning.module.FederatedModule`.
    """

    aggregates_by_mean = takes_rules = False  # matching depends on the clients' weights

    def __init__(
        self,
        net: FedNet,
        mode: Literal["fixed_width", "grow"] = "fixed_width",
        layerwise: bool = False,
        sigma: Positive = 1.0,
        sigma0: Positive = 1.0,
        gamma0: Positive = 7.0,
        sweeps: CountOrZero = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        if self.local.keep_optimizer:
            raise FederationError(
                "FedMA permutes hidden units, which would not match the moments that a client keeps: leave "
                "keep_optimizer out."
            )
        self.mode = mode
        self.grows = mode == "grow"
        if mode == "grow" and (layerwise or self.server_optimizer is not None or self.buffers_policy != "average"):
            raise FederationError(
                "mode='grow' changes the net's shapes: leave out layerwise, server_optimizer and buffers."
            )
        if self.buffers_policy == "keep":
            raise FederationError("FedMA permutes running statistics with their units: buffers must not be keep.")
        if layerwise and kwargs.get("store") is not None:
            raise FederationError("layerwise=True changes which layers clients keep: leave store out.")
        self.layerwise, self.matching = layerwise, Matching(sigma, sigma0, gamma0, sweeps)
        self.units: list[Units] = []
        #: Initial widths of the layers.
        self.widths: list[int] = []
        #: Permutation of the last matched layer's units, by client.
        self.places: dict[int, Tensor] = {}
        self._stages: dict[str, int] = {}
        self._moved = 0.0

    # both sides: the net's units

    def ready(self, x: Tensor) -> None:
        """Find the net's units from a few inputs, unless known."""
        if self.units:
            return
        declare = getattr(self.net, "units", None)  # any module may have it
        declared = declare() if callable(declare) else None
        self.units = derived_units(self.net, x) if declared is None else list(declared)
        state = {name: value.detach() for name, value in entries(self.net).items()}
        check_units(self.net, lambda s, x: self.call(s, x, training=False)[0], state, x, self.units)
        self.widths = self.widths or [units.width for units in self.units]
        if self.mode == "grow" and not all(units.fills(state) for units in self.units):
            raise FederationError(
                f"mode='grow' requires units that span whole dimensions, unlike those of {type(self.net).__name__}: "
                "use fixed_width."
            )
        self._stages = stages_of(self.net, self.units)

    def turn(self, round: int) -> int:
        """Return the layer matched in a round; the last stage averages everything after the hidden layers."""
        return round % (len(self.units) + 1) if self.layerwise else 0

    # client

    def plan(self, me: Me) -> LocalMethod:
        """Freeze layers that are already matched."""
        if not self.layerwise:
            return self
        names = tuple(name for name in self.trainable_names if self._stages[name] >= self.turn(me.round))
        return Plan(self, [Phase(self.local.epochs, names)])

    def enter(self, received: State, me: Me) -> State:
        """Return the received model; within a cycle, the received layer and the client's other layers, permuted."""
        if not self.layerwise:
            return super().enter(received, me)
        self.ready(next(me.data.batches(2, self.compute_dtype))[0])
        state, turn = {**self.fresh_buffers(), **received}, self.turn(me.round)
        if PLACES not in state:
            return state
        own = self.units[turn - 1].placed(under(OWN, me.private), state.pop(PLACES))
        return {**own, **state}

    def leave(self, state: State, received: State, me: Me) -> Reply:
        """Send the model; within a cycle, only the layer to match, and keep all others."""
        up, keep = super().leave(state, received, me)
        if not self.layerwise:
            return Reply(up, keep)
        turn = self.turn(me.round)
        sent = {name: value for name, value in up.items() if self._stages[name] == turn}
        rest = {name: value for name, value in up.items() if name not in sent} if turn < len(self.units) else {}
        return Reply(sent, prefixed(OWN, rest))

    # server

    def on_fit_start(self) -> None:
        """Find the net's units, after a checkpoint has restored its shapes."""
        super().on_fit_start()
        self.units = []
        self.ready(self.example())

    on_test_start = on_fit_start  # attacks request messages from clients

    def aggregate(self, messages: list[Message]) -> State:
        """Match the units layer by layer and average the models."""
        self._moved = 0.0
        if self.layerwise:
            return self._one_layer(messages)
        reference, masks = self.server_state(), []
        for number, units in enumerate(self.units):
            most = GROWTH * self.widths[number] if self.mode == "grow" else None
            places, width = self._match(number, reference, messages, most)
            messages = self._placed(messages, units, places, width)
            if width > units.width:
                reference = units.placed(reference, torch.arange(units.width), width)
            masks.append(torch.stack([torch.zeros(width).index_fill(0, place, 1.0) for place in places]))
            self.units[number] = replace(units, width=width)
        mean = super().aggregate(messages)
        if self.mode == "grow":
            mean = self._renormalised(mean, reference, messages, masks)
            self._resize(mean)
        return mean

    def _resize(self, state: State) -> None:
        """Resize the net's layers to the shapes of a state and rebuild everything derived from the old shapes."""
        if any(value.shape != state[name].shape for name, value in entries(self.net).items() if name in state):
            resize(self.net, state)
            self.forget_net()
            self.engine.reset()

    def _match(
        self, number: int, reference: State, messages: list[Message], most: int | None
    ) -> tuple[list[Tensor], int]:
        """Return the permutation of each client's units in one layer."""
        units = self.units[number]
        rng = seeding.stream(self.seed, "matching", self.completed_rounds, number)
        sent = messages[0].tensors.keys()
        first = units.describe({name: value for name, value in reference.items() if name in sent})
        rows = [units.describe(m.tensors).cpu().numpy() for m in messages]
        places, width = self.matching(first.cpu().numpy(), rows, rng, most)
        self._moved += sum(float(np.mean(place != np.arange(units.width))) for place in places) / len(places)
        return [torch.from_numpy(place) for place in places], width

    @staticmethod
    def _placed(messages: list[Message], units: Units, places: list[Tensor], width: int) -> list[Message]:
        return [
            replace(m, tensors=units.placed(m.tensors, place, width)) for m, place in zip(messages, places, strict=True)
        ]

    def _renormalised(self, mean: State, reference: State, messages: list[Message], masks: list[Tensor]) -> State:
        """Average a unit's own entries over the clients that have it; a unit without clients is not changed.

        Outgoing weights count as zero for clients without the unit, so the averaged layer outputs the average of the
        clients' layers.
        """
        weights = torch.tensor(message_weights(messages, self.weighting), dtype=torch.float64)
        for units, mask in zip(self.units, masks, strict=True):
            share = weights @ mask.double()
            for axis in units.axes:
                value = mean[axis.entry]
                if axis.role == "use" or not value.is_floating_point():
                    continue
                whole = torch.ones(value.shape[axis.dim], dtype=torch.float64)
                positions = axis.positions(units.width)
                whole[positions.flatten()] = share.repeat_interleave(positions.shape[1])
                shape = [1] * value.dim()
                shape[axis.dim] = -1
                whole = whole.view(shape).to(value.device)
                mean[axis.entry] = torch.where(whole > 0, value.double() / whole, reference[axis.entry]).to(value.dtype)
        return mean

    def round_metrics(self) -> dict[str, float]:
        """Return the share of permuted units, mean over layers and clients."""
        return {"matching/moved": self._moved / max(1, 1 if self.layerwise else len(self.units))}

    def _goes_on(self, client: int) -> bool:
        """Whether a client's units were matched in the previous round, so that it continues with the layers above."""
        return self.turn(self.completed_rounds) > 0 and client in self.places

    def message_down(self, client: int) -> State:
        """Return the model; within a cycle, only the layer just matched and the permutation of the client's units."""
        message = super().message_down(client)
        if not (self.layerwise and self._goes_on(client)):
            return message
        last = self.turn(self.completed_rounds) - 1
        message = {name: value for name, value in message.items() if self._stages[name] == last}
        return message | {PLACES: self.places[client]}

    def _one_layer(self, messages: list[Message]) -> State:
        turn = self.turn(self.completed_rounds)
        if turn < len(self.units):
            places, width = self._match(turn, self.server_state(), messages, None)
            self.places = {m.client: place for m, place in zip(messages, places, strict=True)}
            messages = self._placed(messages, self.units[turn], places, width)
        return self.mean(messages)

    def server_extras(self) -> dict[str, Any]:
        """Return the initial widths and the last permutations."""
        return {"widths": list(self.widths), "places": dict(self.places)}

    def load_server_extras(self, extras: dict[str, Any]) -> None:
        """Restore the server's state."""
        self.widths = list(extras["widths"])
        self.places = {int(client): place for client, place in extras["places"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resize layers that had grown."""
        if self.mode == "grow":
            prefix = "net."
            saved = checkpoint["state_dict"].items()
            self._resize({name.removeprefix(prefix): value for name, value in saved if name.startswith(prefix)})
        super().on_load_checkpoint(checkpoint)


def stages_of(net: nn.Module, units: Sequence[Units]) -> dict[str, int]:
    """Return the round of a cycle in which each entry is matched and averaged.

    An entry belongs to the last units it produces; one that only reads units to the next stage; one without units to
    the stage of the entry before it. Entries are ordered by layer, so that running statistics follow the weights of
    their layer.

    Args:
        net: the network.
        units: its units, in order.
    """
    own = entries(net)  # parameters, then buffers, by layer
    makes: dict[str, int] = {}
    reads: dict[str, int] = {}
    for number, group in enumerate(units):
        for axis in group.axes:
            (reads if axis.role == "use" else makes)[axis.entry] = number
    stages: dict[str, int] = {}
    before = 0
    for name in (name for name in net.state_dict() if name in own):
        before = makes[name] if name in makes else reads[name] + 1 if name in reads else before
        stages[name] = before
    return stages
