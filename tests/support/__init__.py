"""Small federations and runs shared by tests."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.arguments import parameters, settings
from fl_lightning.datamodules import FederatedDataModule, TensorFederation
from fl_lightning.engine import Phase
from fl_lightning.methods import FedAvg
from fl_lightning.module import FederatedModule
from fl_lightning.nets import MLP

FEATURES, CLASSES = 20, 4
#: Per client: training samples. Ragged, with last partial batches of several sizes for B = 8.
RAGGED = (40, 27, 33, 16)


class Idle(FedAvg):
    """FedAvg without local steps."""

    def phases(self) -> list[Phase]:
        return [Phase(0, self.trainable_names)]


def blobs(
    sizes: Sequence[int] = RAGGED, shape: tuple[int, ...] = (FEATURES,), seed: int = 0, **kwargs: Any
) -> TensorFederation:
    """Gaussian classes, each client with its own skew and ten test samples, without validation samples."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, *shape, generator=generator)
    inputs, targets, train, test = [], [], [], []
    start = 0
    for client, size in enumerate(sizes):
        share = torch.full((CLASSES,), 0.2)
        share[client % CLASSES] = 1.0
        y = torch.multinomial(share, size + 10, replacement=True, generator=generator)
        inputs.append(centres[y] + torch.randn(size + 10, *shape, generator=generator))
        targets.append(y)
        train.append(list(range(start, start + size)))
        test.append(list(range(start + size, start + size + 10)))
        start += size + 10
    x, y = torch.cat(inputs), torch.cat(targets)
    return TensorFederation(x, y, train=train, test=test, num_classes=CLASSES, **{"val_fraction": 0.0, **kwargs})


def mlp(seed: int = 0, hidden: tuple[int, ...] = (16,)) -> MLP:
    """MLP 20-16-4 with biases and seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(in_features=FEATURES, hidden=hidden, num_classes=CLASSES, bias=True)


def trainer(rounds: int = 3, **kwargs: Any) -> Trainer:
    """Build a silent stock Trainer on the CPU, by default in float64."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    settings: dict[str, Any] = {
        "max_epochs": rounds,
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**settings, **kwargs})


def fit(
    method: FederatedModule, data: FederatedDataModule, rounds: int = 3, ckpt_path: str | None = None, **kwargs: Any
) -> Trainer:
    """Run a federation and return the Trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*log_every_n_steps.*|.*does not have many workers.*")
        run = trainer(rounds, **kwargs)
        run.fit(method, datamodule=data, ckpt_path=ckpt_path)
    return run


def weights(method: FederatedModule) -> dict[str, Tensor]:
    """Copy the server's entries."""
    return {name: value.detach().clone() for name, value in method.net.state_dict().items()}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over all entries; the names must be equal."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def sgd(net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], **kwargs: Any) -> None:
    """Train with a bare PyTorch loop, the reference."""
    optimizer = torch.optim.SGD(net.parameters(), **kwargs)
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def planted(clients: int = 8, size: int = 24, seed: int = 0, **kwargs: Any) -> TensorFederation:
    """Two kinds of clients: the same inputs by class, but odd clients shift all labels by one."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    y = torch.arange(clients * (size + 8)) % CLASSES
    x = centres[y] + 0.5 * torch.randn(len(y), FEATURES, generator=generator)
    owner = torch.arange(len(y)) // (size + 8)
    starts = [client * (size + 8) for client in range(clients)]
    return TensorFederation(
        x,
        torch.where(owner % 2 == 1, (y + 1) % CLASSES, y),
        train=[list(range(start, start + size)) for start in starts],
        test=[list(range(start + size, start + size + 8)) for start in starts],
        num_classes=CLASSES,
        **{"val_fraction": 0.0, **kwargs},
    )


def gathered(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a class with those of its settings gathered under the option that takes them."""
    places = {one: place for place, inner in settings(kind).items() for one in parameters(inner)}
    found: dict[str, Any] = {name: value for name, value in options.items() if name not in places}
    for name in options.keys() & places.keys():
        found.setdefault(places[name], {})[name] = options[name]
    return found


def untimed(summary: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a round, without times."""
    return {name: value for name, value in summary.items() if not name.startswith("time/")}
