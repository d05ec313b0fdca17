"""The bidirectional LSTM: exact size, padding that is not there, and every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fl_lightning.datamodules import TensorFederation
from fl_lightning.engine import CapturedEngine
from fl_lightning.methods import FedAvg
from fl_lightning.nets import NETS, BiLSTM
from tests.support import blobs, fit, largest_difference, weights

LENGTHS = (9, 4, 1, 7)


def tokens(lengths: tuple[int, ...] = LENGTHS, size: int = 9, rows: int = 50) -> Tensor:
    x = torch.randint(1, rows, (len(lengths), size), generator=torch.Generator().manual_seed(0))
    return x * (torch.arange(size) < torch.tensor(lengths)[:, None])


def small(**kwargs: Any) -> BiLSTM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BiLSTM(**{"num_embeddings": 50, "embedding": 8, "units": 5, **kwargs})


def test_parameters() -> None:
    net = NETS["bilstm"]()
    assert type(net) is BiLSTM
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in net.named_children()}
    assert sizes == {"embedding": 2_000_200, "lstm": 84_992, "norm": 256, "dropout": 0, "head": 258}
    assert net.dropout.p == 0.3


def test_features_are_the_mean_outputs_of_packed_sequences() -> None:
    net, x, lengths = small().eval(), tokens(), torch.tensor(LENGTHS)
    packed = pack_padded_sequence(net.embedding(x), lengths, batch_first=True, enforce_sorted=False)
    outputs, _ = pad_packed_sequence(net.lstm(packed)[0], batch_first=True)
    torch.testing.assert_close(net.features(x), outputs.sum(1) / lengths[:, None])


def test_padding_and_the_rest_of_the_batch_do_not_matter() -> None:
    net, x = small().eval(), tokens()
    longer = torch.cat((x, torch.zeros(4, 5, dtype=torch.int64)), 1)
    torch.testing.assert_close(net(longer), net(x))
    torch.testing.assert_close(net(x[1:2, :4]), net(x)[1:2])
    assert torch.equal(net.features(torch.zeros(1, 3, dtype=torch.int64)), torch.zeros(1, 10))


def test_every_parameter_but_the_paddings_embedding_is_used() -> None:
    net = small().eval()
    net(tokens()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert net.embedding.weight.grad[0].abs().sum() == 0


class Recurrent(nn.Module):
    """A user's net with PyTorch's own recurrent layer, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(20, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, None].expand(-1, 3, -1))[0].mean(1))


def sequences() -> TensorFederation:
    x, y = tokens(tuple(1 + i % 4 for i in range(30)), size=4), torch.arange(30) % 2
    train, test = [list(range(10 * k, 10 * k + 8)) for k in range(3)], [[10 * k + 9] for k in range(3)]
    return TensorFederation(x, y, train=train, test=test, num_classes=2)


@pytest.mark.parametrize("kind", ["bilstm", "own"])
def test_trains_alike_through_every_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedEngine, "seldom", 0)
    ends, start = [], {}
    for engine in ("sequential", "stacked", "captured"):
        torch.manual_seed(0)
        net, data = (small(), sequences()) if kind == "bilstm" else (Recurrent(), blobs((8, 8, 8)))
        start = {name: value.clone().double() for name, value in net.state_dict().items()}
        method = FedAvg(net, lr=0.1, batch_size=4, momentum=0.5, engine=engine)
        fit(method, data, rounds=2)
        ends.append(weights(method))
    assert largest_difference(ends[0], ends[1]) < 1e-12
    assert largest_difference(ends[1], ends[2]) == 0.0
    assert all(float((ends[0][name] - start[name]).abs().max()) > 1e-6 for name in start)
