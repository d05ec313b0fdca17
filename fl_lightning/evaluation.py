"""Every client with its own model on its own samples; clients that share a model in one batched pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.federation import Federation, Split
from fl_lightning.layout import StackLayout, fast_in_stack
from fl_lightning.metrics import ClientAccuracy, client_summary
from fl_lightning.wire import State, fast_copy

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Samples in one forward pass; what convolutions make of larger batches leaves the cache and takes longer.
SAMPLES, SAMPLES_CONVOLVED = 512, 128
#: Personal models stacked in one forward pass, and samples of all of them together.
MODELS, STACKED_SAMPLES = 20, 2048
#: Bytes of normalised inputs that are kept from one evaluation to the next.
KEPT = 2**27

ClientOutput = tuple[int, Tensor, Tensor]


class Samples(NamedTuple):
    """The samples of several clients, one client after the other."""

    places: Tensor
    sizes: list[int]
    targets: Sequence[Tensor]

    @classmethod
    def of(cls, federation: Federation, clients: Sequence[int], split: Split) -> Samples:
        """Those of a split."""
        parts = [federation.index(split)[client] for client in clients]
        targets = [_targets(federation, client, part) for client, part in zip(clients, parts, strict=True)]
        return cls(torch.cat(parts), list(map(len, parts)), targets)


class Evaluator:
    """Collects what clients score in an evaluation and keeps the last scores of each split.

    Attributes:
        scores: accuracy of every client by split, shape (clients,), NaN where a client was not evaluated.
    """

    def __init__(self) -> None:
        self.scores: dict[str, Tensor] = {}
        self._metric: ClientAccuracy | None = None
        self._stackable = True
        self._inputs: dict[tuple[Any, ...], Tensor] = {}
        self._last: dict[Split, tuple[Any, Samples]] = {}

    def prepare(self, num_clients: int) -> None:
        """Get ready for a federation of so many clients."""
        self._inputs.clear()
        self._last.clear()
        self._metric = ClientAccuracy(num_clients, sync_on_compute=False)  # every process evaluates all clients

    def clear(self) -> None:
        """Forget what was collected since the last evaluation began."""
        self._collected.reset()

    @property
    def _collected(self) -> ClientAccuracy:
        assert self._metric is not None, "the evaluator is prepared in setup()"
        return self._metric

    def update(self, module: FederatedModule, clients: Tensor, split: Split) -> None:
        """Evaluate some clients.

        Args:
            module: the method.
            clients: their numbers, shape (K,).
            split: ``val`` (what is held out of their training data, else their test data) or ``test``.
        """
        scored, outputs, targets = zip(*self.outputs(module, clients.tolist(), split), strict=True)
        total = torch.tensor([len(target) for target in targets], device=clients.device)
        logits, target = torch.cat(outputs), torch.cat(targets)
        losses = F.cross_entropy(logits.double(), target, reduction="none")
        correct = (logits.argmax(1) == target).to(losses)
        owner = torch.repeat_interleave(total)  # of every sample, the place of its client
        per_client = losses.new_zeros(len(total), 2).index_add_(0, owner, torch.stack([correct, losses], dim=1))
        rows = torch.tensor(scored, device=clients.device)
        self._collected.to(clients.device).update(rows, per_client[:, 0], per_client[:, 1], total)

    def accuracies(self) -> Tensor:
        """Accuracy of every client in the evaluation under way, shape (clients,), NaN for clients not yet seen."""
        found: Tensor = self._collected.compute()["acc"]
        return found.detach().reshape(-1).clone().cpu()  # torchmetrics leaves no dimension where there is one client

    def compute(self, module: FederatedModule, split: Split) -> dict[str, Tensor]:
        """What to log: mean, spread and worst tenth over clients; the server's models on the global test set."""
        computed = self._collected.compute()
        self.scores[split] = self.accuracies()
        summary = client_summary(computed["acc"])
        logs = {
            f"{split}/acc": summary["mean"],
            f"{split}/acc_std": summary["std"],
            f"{split}/acc_worst10": summary["worst10"],
            f"{split}/loss": client_summary(computed["loss"])["mean"],
        }
        federation = module.federation
        untouched = split == "test" or federation.val is None
        models = module.global_models() if federation.global_test is not None and untouched else []
        if models:
            scores = [share * self._global_accuracy(module, federation, state) for share, state in models]
            logs[f"{split}/global_acc"] = torch.stack(scores).sum()
        return logs

    def outputs(self, module: FederatedModule, clients: Sequence[int], split: Split) -> Iterator[ClientOutput]:
        """(client, logits, labels) of each client's samples with the model it is evaluated with.

        No sample of another client, nor padding, is in a batch that the net normalises over.
        """
        module.prepare_evaluation(clients)
        if module.functional.always_batch_statistics:
            for client in clients:
                yield from self._one_model(module, [client], split)
            return
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(module.model_key(client), []).append(client)
        for group in groups.values():
            if len(group) > 1:
                yield from self._one_model(module, group, split)
        alone = [group[0] for group in groups.values() if len(group) == 1]
        for start in range(0, len(alone), MODELS):
            yield from self._many_models(module, alone[start : start + MODELS], split)

    def _many_models(self, module: FederatedModule, clients: list[int], split: Split) -> Iterator[ClientOutput]:
        if self._stackable and len(clients) > 1:
            try:
                yield from _stacked(module, clients, split)
                return
            except Exception:  # whatever a net does that vmap cannot: one after the other
                self._stackable = False
        for client in clients:
            yield from self._one_model(module, [client], split)

    @torch.no_grad()
    def losses(self, module: FederatedModule, states: Sequence[State], client: int, split: Split = "train") -> Tensor:
        """Mean loss of several models over all of a client's samples in one pass, as :func:`mean_loss`, shape (K,)."""
        if self._stackable and len(states) > 1:
            try:
                return _stacked_losses(module, states, client, split)
            except Exception:  # as above
                self._stackable = False
        return torch.stack([mean_loss(module, state, client, split) for state in states])

    def _one_model(self, module: FederatedModule, clients: list[int], split: Split) -> Iterator[ClientOutput]:
        """All samples of clients that share a model, in large batches across clients."""
        federation, state = module.federation, fast_copy(module.personal_state(clients[0]))
        own = self._own(federation, clients, split)
        ready = self._ready(module, federation, own.places, (split, *clients))
        batches = [self._logits(module, state, x) for x in ready(_samples(state))]
        return zip(clients, torch.split(torch.cat(batches), own.sizes), own.targets, strict=True)

    def _logits(self, module: FederatedModule, state: State, x: Tensor) -> Tensor:
        """What one model says of a batch; convolutions that are fast in a stack are made as if this was one."""
        with StackLayout(mapped=False) if fast_in_stack(state) else nullcontext():
            return module.call(state, x, training=False)[0]

    def _own(self, federation: Federation, clients: list[int], split: Split) -> Samples:
        """The clients' samples; those asked for last are remembered."""
        key = (id(federation), clients)
        if split not in self._last or self._last[split][0] != key:
            self._last[split] = key, Samples.of(federation, clients, split)
        return self._last[split][1]

    def _ready(
        self, module: FederatedModule, federation: Federation, index: Tensor, key: tuple[Any, ...]
    ) -> Callable[[int], Iterable[Tensor]]:
        """Normalised inputs in batches of a given size; where they are few they are kept for the next evaluation."""
        dtype = module.compute_dtype
        key = (id(federation), dtype, *key)
        if key not in self._inputs:
            size = len(index) * federation.inputs[0].numel() * dtype.itemsize
            if size + sum(kept.nbytes for kept in self._inputs.values()) > KEPT:
                return lambda n: (federation.features(federation.inputs[part], dtype) for part in torch.split(index, n))
            self._inputs[key] = federation.features(federation.inputs[index], dtype)
        return lambda n: torch.split(self._inputs[key], n)

    def _global_accuracy(self, module: FederatedModule, federation: Federation, state: State) -> Tensor:
        assert federation.global_test is not None
        index, state = federation.global_test, fast_copy(state)
        correct = torch.zeros((), dtype=torch.float64, device=federation.device)
        samples, ready = _samples(state), self._ready(module, federation, index, ("global",))
        for part, x in zip(torch.split(index, samples), ready(samples), strict=True):
            logits = self._logits(module, state, x)
            correct += (logits.argmax(1) == federation.targets[part]).sum()
        return correct / len(index)

    def state_dict(self) -> dict[str, Tensor]:
        """The last scores, for a checkpoint."""
        return dict(self.scores)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back saved scores."""
        self.scores = dict(state)


@torch.no_grad()
def mean_loss(module: FederatedModule, state: State, client: int, split: Split = "train") -> Tensor:
    """Mean loss of a model over all of a client's samples: one pass in a fixed order, nothing drawn.

    The net is in eval mode (no dropout, running statistics) and samples are not augmented, so the value is that of
    the model alone and the same on every call.

    Args:
        module: the method, for its net and its loss.
        state: the model, at least all entries of the net.
        client: the client.
        split: which of the client's samples.

    Returns:
        The mean, 0-dim, summed up in float64.
    """
    federation, state = module.federation, fast_copy(state)
    index = federation.index(split)[client]
    total = torch.zeros((), dtype=torch.float64, device=federation.device)
    for part in torch.split(index, _samples(state)):
        x, y = federation.gather([client], part[None], module.compute_dtype)
        total += module.batch_loss(state, x[0], y[0], training=False)[0].double() * len(part)
    return total / len(index)


def _stacked_losses(module: FederatedModule, states: Sequence[State], client: int, split: Split) -> Tensor:
    """Mean losses of stacked models on the same samples."""
    federation = module.federation
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    index = federation.index(split)[client]
    total = torch.zeros(len(states), dtype=torch.float64, device=federation.device)
    for part in torch.split(index, _samples(states[0])):
        x, y = federation.gather([client], part[None], module.compute_dtype)

        def one(state: State, x: Tensor = x[0], y: Tensor = y[0]) -> Tensor:
            with StackLayout():
                return module.batch_loss(state, x, y, training=False)[0]

        total += torch.vmap(one)(stacked).double() * len(part)
    return total / len(index)


def _samples(state: State) -> int:
    return SAMPLES_CONVOLVED if any(value.dim() >= 4 for value in state.values()) else SAMPLES


def _targets(federation: Federation, client: int, index: Tensor) -> Tensor:
    """A client's labels, in its own labelling where it has one."""
    targets = federation.targets[index]
    return targets if federation.label_maps is None else federation.label_maps[client][targets]


def _stacked(module: FederatedModule, clients: list[int], split: Split) -> list[ClientOutput]:
    """Clients with a model each: models stacked, samples padded to the longest and cut again."""
    federation = module.federation
    states = [module.personal_state(client) for client in clients]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    parts = [federation.index(split)[client] for client in clients]
    index = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def one(state: State, x: Tensor) -> Tensor:
        with StackLayout():
            return module.call(state, x, training=False)[0]

    logits = []
    for part in torch.split(index, max(1, STACKED_SAMPLES // len(clients)), dim=1):
        x = federation.features(federation.inputs[part.reshape(-1)], module.compute_dtype)
        logits.append(torch.vmap(one)(stacked, x.view(*part.shape, *x.shape[1:])))
    scores = torch.cat(logits, dim=1)
    return [
        (client, scores[k, : len(part)], _targets(federation, client, part))
        for k, (client, part) in enumerate(zip(clients, parts, strict=True))
    ]
