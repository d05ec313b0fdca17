"""Evaluation of every client with its own model on its own samples; clients that share a model are batched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.exchange import Scores
from fl_lightning.federation import Federation, Split
from fl_lightning.layout import StackLayout, fast_in_stack
from fl_lightning.metrics import client_summary
from fl_lightning.metrics.per_client import PerClient
from fl_lightning.model import NamedModel
from fl_lightning.parties import EVALUATION, SANITY_CHECK, LocalData, Setting
from fl_lightning.tasks import Classification, Task
from fl_lightning.wire import State, fast_copy

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

#: Samples per forward pass; larger batches of convolutions overflow the cache and are slower.
SAMPLES, SAMPLES_CONVOLVED = 512, 128
#: Personal models stacked per forward pass, and total samples of such a pass.
MODELS, STACKED_SAMPLES = 20, 2048
#: Maximum size in bytes of the normalised inputs cached between evaluations.
KEPT = 2**27

#: A client's row in the data, its model's outputs and its targets.
ClientOutput = tuple[int, Tensor, Tensor]


class Samples(NamedTuple):
    """The samples of several clients, concatenated."""

    places: Tensor
    sizes: list[int]
    targets: Sequence[Tensor]

    @classmethod
    def of(cls, federation: Federation, clients: Sequence[int], split: Split) -> Samples:
        """Return the samples of a split."""
        parts = [federation.index(split)[client] for client in clients]
        targets = [federation.labels([client], part[None])[0] for client, part in zip(clients, parts, strict=True)]
        return cls(torch.cat(parts), list(map(len, parts)), targets)


class Personal(NamedTuple):
    """The model on which a client is evaluated."""

    row: int
    """The client's row in the data."""
    state: State
    shared: bool
    """Whether all entries were received, so that other clients may have the identical tensors."""


class Scorer:
    """Runs personal models on their clients' samples, in batches."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[Any, ...], Tensor] = {}
        self._last: dict[Split, tuple[Any, Samples]] = {}

    def clear(self) -> None:
        """Drop cached inputs."""
        self._inputs.clear()
        self._last.clear()

    def outputs(
        self, method: NamedModel, federation: Federation, models: Iterable[Personal], split: Split
    ) -> Iterator[ClientOutput]:
        """Yield the outputs of each client's model on its samples, with the targets.

        A batch that the net normalises over contains samples of one client only, and no padding.
        """
        if method.functional.always_batch_statistics:
            for model in models:
                yield from self._one_model(method, federation, [model.row], model.state, split)
            return
        groups: dict[Any, list[Personal]] = {}
        alone: list[Personal] = []
        for model in models:
            if model.shared:
                groups.setdefault(_identity(model.state), []).append(model)
                continue
            alone.append(model)
            if len(alone) == MODELS:
                yield from self._many_models(method, federation, alone, split)
                alone = []
        for group in groups.values():
            if len(group) > 1:
                yield from self._one_model(method, federation, [model.row for model in group], group[0].state, split)
        alone += [group[0] for group in groups.values() if len(group) == 1]
        for start in range(0, len(alone), MODELS):
            yield from self._many_models(method, federation, alone[start : start + MODELS], split)

    def _many_models(
        self, method: NamedModel, federation: Federation, models: list[Personal], split: Split
    ) -> Iterator[ClientOutput]:
        if method.functional.stackable and len(models) > 1:
            try:
                yield from _stacked(method, federation, models, split)
                return
            except Exception:  # the net does something that vmap cannot: run models one by one
                method.functional.stackable = False
        for model in models:
            yield from self._one_model(method, federation, [model.row], model.state, split)

    def _one_model(
        self, method: NamedModel, federation: Federation, rows: list[int], state: State, split: Split
    ) -> Iterator[ClientOutput]:
        """Run a model shared by several clients on all their samples, in large batches across clients."""
        state, own = fast_copy(state), self._own(federation, rows, split)
        ready = self.ready(method, federation, own.places, (split, *rows))
        batches = [scores_of(method, state, x) for x in ready(batch_size(state))]
        return zip(rows, torch.split(torch.cat(batches), own.sizes), own.targets, strict=True)

    def _own(self, federation: Federation, rows: list[int], split: Split) -> Samples:
        """Return the clients' samples; the last request of each split is cached."""
        key = (id(federation), rows)
        if split not in self._last or self._last[split][0] != key:
            self._last[split] = key, Samples.of(federation, rows, split)
        return self._last[split][1]

    def ready(
        self, method: NamedModel, federation: Federation, index: Tensor, key: tuple[Any, ...]
    ) -> Callable[[int], Iterable[Tensor]]:
        """Return a function from batch size to batches of normalised inputs, cached if they are few."""
        dtype = method.compute_dtype
        key = (id(federation), dtype, *key)
        if key not in self._inputs:
            size = len(index) * federation.inputs[0].numel() * dtype.itemsize
            if size + sum(kept.nbytes for kept in self._inputs.values()) > KEPT:
                return lambda n: (federation.features(federation.inputs[part], dtype) for part in torch.split(index, n))
            self._inputs[key] = federation.features(federation.inputs[index], dtype)
        return lambda n: torch.split(self._inputs[key], n)


def scores_of(method: NamedModel, state: State, x: Tensor) -> Tensor:
    """Return the outputs of one model for a batch, using the stack's layout for convolutions where it is faster."""
    with StackLayout(mapped=False) if fast_in_stack(state) else nullcontext():
        return method.call(state, x, training=False)[0]


def batch_size(state: State) -> int:
    """Return the number of samples per forward pass of a model."""
    return SAMPLES_CONVOLVED if any(value.dim() >= 4 for value in state.values()) else SAMPLES


def scored(outputs: Iterable[ClientOutput], device: torch.device, task: Task) -> Scores:
    """Compute losses and metrics of clients from their models' outputs, each client's in one tensor."""
    rows, found, targets = zip(*outputs, strict=True)
    clients, total = torch.tensor(rows, device=device), torch.tensor([len(t) for t in targets], device=device)
    per_client = PerClient(task.known_metrics(task.channels(found[0])), len(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example that a client has no sample of some class
        per_client.update(range(len(rows)), [task.scores(output) for output in found], targets)
    metrics = {name: value.to(device) for name, value in per_client.compute().items()}
    return Scores(clients, _summed_losses(found, targets, total, task), total, metrics)


def _summed_losses(outputs: Sequence[Tensor], targets: Sequence[Tensor], total: Tensor, task: Task) -> Tensor:
    """Return the summed loss of every client in float64; cross entropy is computed for all clients at once."""
    if type(task).loss is not Classification.loss:
        losses = [task.loss(output.double(), target) for output, target in zip(outputs, targets, strict=True)]
        return torch.stack(losses).double() * total
    each = F.cross_entropy(torch.cat(list(outputs)).double(), torch.cat(list(targets)), reduction="none")
    owner = torch.repeat_interleave(total)  # index of the client of each sample
    return each.new_zeros(len(total)).index_add_(0, owner, each)


class Evaluator:
    """Collects the clients' scores of an evaluation and keeps the last scores of each split.

    Attributes:
        scores: the headline metric of every client by split, shape (clients,), NaN where a client was not evaluated.
    """

    def __init__(self) -> None:
        self.scores: dict[str, Tensor] = {}
        self.collected: dict[str, Tensor] = {}
        self._clients = 0
        self._scorer = Scorer()

    def prepare(self, num_clients: int) -> None:
        """Prepare for a federation of ``num_clients``."""
        self._scorer.clear()
        self._clients = num_clients
        self.clear()

    def clear(self) -> None:
        """Drop what was collected since the evaluation began."""
        self.collected = {}

    def update(self, module: FederatedModule, clients: Tensor, split: Split) -> None:
        """Evaluate some clients.

        Args:
            module: the method.
            clients: their numbers, shape (K,).
            split: ``val``, which is held out of their training data, or ``test``.
        """
        messages = {client: module.evaluation_down(client) for client in clients.tolist()}
        found = module.exchange.evaluate(evaluation_setting(module), messages, split)
        rows = found.clients.cpu()
        for name, values in {**found.metrics, "loss": found.loss / found.total}.items():
            self.known(name)[rows] = values.detach().cpu().double()

    def known(self, name: str) -> Tensor:
        """Return a metric of every client in the running evaluation, shape (clients,), NaN if not yet evaluated."""
        empty = torch.full((self._clients,), torch.nan, dtype=torch.float64)
        return self.collected.setdefault(name, empty)

    def headline(self, task: Task) -> Tensor:
        """Return the task's headline metric of every client in the running evaluation; see :meth:`known`."""
        return self.known(task.headline).clone()

    def compute(self, module: FederatedModule, split: Split) -> dict[str, Tensor]:
        """Return metrics to log: mean, spread and worst tenth of clients; global models on the global test set."""
        task, logs = module.task, dict[str, Tensor]()
        self.scores[split] = self.known(task.headline).clone()
        metrics = task.known_metrics(2)
        for name, values in self.collected.items():
            if name == "loss":
                continue
            better = task.higher_is_better if name == task.headline else _higher_is_better(metrics.get(name))
            summary = client_summary(values, better)
            logs |= {f"{split}/{name}": summary["mean"], f"{split}/{name}_std": summary["std"]}
            logs[f"{split}/{name}_worst10"] = summary["worst10"]
        logs[f"{split}/loss"] = client_summary(self.known("loss"))["mean"]
        federation = module.federation
        models = module.global_models() if federation.global_test is not None and split == "test" else []
        if models:
            scores = [(share, self._global(module, federation, state)) for share, state in models]
            for name in scores[0][1]:
                logs[f"{split}/global_{name}"] = torch.stack([share * found[name] for share, found in scores]).sum()
        return logs

    def _global(self, module: FederatedModule, federation: Federation, state: State) -> dict[str, Tensor]:
        """Return the task's metrics of a model on the global test set."""
        assert federation.global_test is not None
        index, state, task = federation.global_test, fast_copy(state), module.task
        samples, ready = batch_size(state), self._scorer.ready(module, federation, index, ("global",))
        found: PerClient | None = None
        for part, x in zip(torch.split(index, samples), ready(samples), strict=True):
            output = scores_of(module, state, x)
            found = PerClient(task.known_metrics(task.channels(output)), 1) if found is None else found
            found.update([0], [task.scores(output)], [federation.targets[part]])
        assert found is not None
        return {name: value[0] for name, value in found.compute().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the last scores, for a checkpoint."""
        return dict(self.scores)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved scores."""
        self.scores = dict(state)


def _higher_is_better(metric: Metric | None) -> bool:
    """Return whether higher is better; true for metrics that do not say, such as those logged by a net."""
    return metric is None or metric.higher_is_better is not False


def evaluation_setting(module: FederatedModule) -> Setting:
    """Return the setting of an evaluation."""
    checking = module._trainer is not None and module._trainer.sanity_checking
    return module.setting(SANITY_CHECK if checking else EVALUATION)


@torch.no_grad()
def mean_loss(method: NamedModel, state: State, data: LocalData, split: Split = "train") -> Tensor:
    """Return the mean loss of a model over all of a client's samples, in one deterministic pass.

    The net is in eval mode (no dropout, running statistics) and samples are not augmented, so the value depends on the
    model alone.

    Args:
        method: provides the net and the loss.
        state: the model, at least all entries of the net.
        data: the client's samples.
        split: the split to use.

    Returns:
        The mean, 0-dim, accumulated in float64.
    """
    state, count = fast_copy(state), 0
    total = torch.zeros((), dtype=torch.float64, device=data.source.device)
    for x, y in data.batches(batch_size(state), method.compute_dtype, split):
        total += method.batch_loss(state, x, y, training=False)[0].double() * len(y)
        count += len(y)
    return total / count


@torch.no_grad()
def mean_losses(method: NamedModel, states: Sequence[State], data: LocalData, split: Split = "train") -> Tensor:
    """Return the mean losses of several models over all of a client's samples in one pass, shape (K,)."""
    if method.functional.stackable and len(states) > 1:
        try:
            return _stacked_losses(method, states, data, split)
        except Exception:  # the net does something that vmap cannot: run models one by one
            method.functional.stackable = False
    return torch.stack([mean_loss(method, state, data, split) for state in states])


def _stacked_losses(method: NamedModel, states: Sequence[State], data: LocalData, split: Split) -> Tensor:
    """Return the mean losses of stacked models on the same samples."""
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    total, count = torch.zeros(len(states), dtype=torch.float64, device=data.source.device), 0
    for inputs, labels in data.batches(batch_size(states[0]), method.compute_dtype, split):

        def one(state: State, x: Tensor = inputs, y: Tensor = labels) -> Tensor:
            with StackLayout():
                return method.batch_loss(state, x, y, training=False)[0]

        total += torch.vmap(one)(stacked).double() * len(labels)
        count += len(labels)
    return total / count


def _identity(state: State) -> tuple[Any, ...]:
    """Return a key that is equal for two models with the same tensors."""
    return tuple((name, value.data_ptr(), value.shape) for name, value in state.items())


def _stacked(method: NamedModel, federation: Federation, models: list[Personal], split: Split) -> list[ClientOutput]:
    """Evaluate clients with a model each: models are stacked, samples padded to the longest and cut again."""
    states = [model.state for model in models]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    parts = [federation.index(split)[model.row] for model in models]
    index = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def one(state: State, x: Tensor) -> Tensor:
        with StackLayout():
            return method.call(state, x, training=False)[0]

    logits = []
    for part in torch.split(index, max(1, STACKED_SAMPLES // len(models)), dim=1):
        x = federation.features(federation.inputs[part.reshape(-1)], method.compute_dtype)
        logits.append(torch.vmap(one)(stacked, x.view(*part.shape, *x.shape[1:])))
    scores = torch.cat(logits, dim=1)
    return [
        (model.row, scores[k, : len(part)], federation.labels([model.row], part[None])[0])
        for k, (model, part) in enumerate(zip(models, parts, strict=True))
    ]
