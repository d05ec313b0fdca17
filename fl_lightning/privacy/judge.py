"""The judge of reconstructions: a classifier trained independently on all data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import seeding
from fl_lightning.errors import FederationError
from fl_lightning.federation import Federation
from fl_lightning.privacy.pixels import Pixels

#: Training of the judge: epochs, batch size and maximum learning rate of Adam.
EPOCHS, BATCH, RATE = 5, 64, 2e-3
WIDTH = 32


class Judge:
    """A classifier and its accuracy on held-out samples.

    Args:
        net: the classifier.
        pixels: the scale of its inputs.
        accuracy: accuracy on the held-out samples.
    """

    def __init__(self, net: nn.Module, pixels: Pixels, accuracy: float) -> None:
        self.net, self.pixels, self.accuracy = net, pixels, accuracy

    @classmethod
    def trained(cls, federation: Federation, seed: int, epochs: int = EPOCHS, path: str | None = None) -> Judge:
        """Train a judge on all rows but test rows, or load the one at ``path``.

        Args:
            federation: the data; test rows are the global test set, else the clients' test sets.
            seed: seed of its weights and batches.
            epochs: number of training epochs.
            path: file of the judge, for other runs on the same data; created if missing.
        """
        pixels = Pixels.of(federation)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _classifier(tuple(federation.inputs.shape[1:]), federation.num_classes)
        net = net.to(federation.device, torch.float32)
        if path is not None and Path(path).exists():
            return cls._read(net, pixels, path, _digest(federation))
        test = federation.test.flat if federation.global_test is None else federation.global_test
        train = torch.ones(len(federation.targets), dtype=torch.bool, device=federation.device)
        train[test] = False
        _train(net, pixels, train.nonzero().flatten(), seed, epochs)
        judge = cls(net, pixels, 0.0)
        called = [judge(pixels.of_rows(part)) for part in torch.split(test, 512)]
        judge.accuracy = float((torch.cat(called) == federation.targets[test]).double().mean())
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"net": net.state_dict(), "accuracy": judge.accuracy, "data": _digest(federation)}, path)
        return judge

    @classmethod
    def _read(cls, net: nn.Module, pixels: Pixels, path: str, digest: str) -> Judge:
        try:
            saved = torch.load(path, map_location=pixels.federation.device, weights_only=True)
            if saved["data"] != digest:
                raise ValueError("other data")
            net.load_state_dict(saved["net"])
        except Exception as error:
            raise FederationError(f"{path} holds no classifier for this data: delete it or name another.") from error
        return cls(net.eval(), pixels, float(saved["accuracy"]))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Classify images with pixels in [0, 1], shape (n, ...)."""
        classes: Tensor = self.net(self.pixels.to_net(images, torch.float32)).argmax(1)
        return classes

    def share(self, images: Tensor, classes: Sequence[int], each: int) -> float:
        """Return the share of images, ``each`` of every class, that the judge assigns to their class."""
        wanted = torch.tensor(classes, device=images.device).repeat_interleave(each)
        return float((self(images) == wanted).double().mean())


def _classifier(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a small convolutional net for images, an MLP for other or small inputs."""
    if len(shape) != 3 or min(shape[1:]) < 12:
        size = int(torch.Size(shape).numel())
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes))
    layers: list[nn.Module] = []
    for before, after in ((shape[0], WIDTH), (WIDTH, 2 * WIDTH)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    flat = 2 * WIDTH * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, classes))


def _train(net: nn.Module, pixels: Pixels, rows: Tensor, seed: int, epochs: int) -> None:
    targets = pixels.federation.targets
    rng = seeding.stream(seed, "attack.judge")
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    steps = max(1, epochs * -(-len(rows) // BATCH))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    net.train()
    for _ in range(epochs):
        for part in torch.split(rows[seeding.permutation(rng, len(rows)).to(rows.device)], BATCH):
            if len(part) == 1:  # too few samples for batch normalisation
                continue
            optimizer.zero_grad()
            F.cross_entropy(net(pixels.to_net(pixels.of_rows(part), torch.float32)), targets[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    net.eval()


def _digest(federation: Federation) -> str:
    """Return the fingerprint of a data set."""
    rows = torch.linspace(0, len(federation.targets) - 1, 100).long().to(federation.device)
    told = (federation.targets, federation.inputs[rows])
    return hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in told)).hexdigest()
