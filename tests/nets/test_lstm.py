"""The bidirectional LSTM: exact size, padding without effect, and every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fl_lightning.datamodules import ByUser, Sent140, TensorFederation
from fl_lightning.engine import CapturedEngine
from fl_lightning.errors import FederationError
from fl_lightning.methods import IFCA, FedAvg, FedGN
from fl_lightning.nets import NETS, BiLSTM
from tests.support import blobs, fit, largest_difference, tweets, weights

LENGTHS = (9, 4, 1, 7)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pytest.importorskip("torchtext", reason="needs the text extra")
    return tweets.write(tmp_path)


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
    outputs, _ = pad_packed_sequence(nn.LSTM.forward(net.lstm, packed)[0], batch_first=True)
    torch.testing.assert_close(net.features(x), outputs.sum(1) / lengths[:, None])


def test_padding_and_the_rest_of_the_batch_do_not_matter() -> None:
    net, x = small().eval(), tokens()
    longer = torch.cat((x, torch.zeros(4, 5, dtype=torch.int64)), 1)
    torch.testing.assert_close(net(longer), net(x))
    torch.testing.assert_close(net(x[1:2, :4]), net(x)[1:2])
    assert torch.equal(net.features(torch.zeros(1, 3, dtype=torch.int64)), torch.zeros(1, 10))


def test_every_parameter_except_the_embedding_of_padding_is_used() -> None:
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
    return TensorFederation(x, y, train=train, test=test, num_classes=2, val_fraction=0)


@pytest.mark.parametrize("kind", ["bilstm", "own"])
def test_every_engine_trains_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert largest_difference(ends[1], ends[2]) < 1e-12  # products are multiplied straight into the weights
    assert all(float((ends[0][name] - start[name]).abs().max()) > 1e-6 for name in start)


# What vmap cannot map it calls client by client, and says so.
@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("kind", [FedAvg, FedGN, IFCA])
def test_trains_on_tweets(kind: type[FedAvg], root: Path) -> None:
    data = Sent140(root=str(root), partition=ByUser(5, 20), vocab_size=30)
    net = small(num_embeddings=data.num_embeddings)
    method = kind(net, lr=0.5, epochs=4, batch_size=8, engine="stacked")
    run = fit(method, data, rounds=6, precision="32-true")
    assert float(run.callback_metrics["train/loss"]) < 0.68
    assert method.net.embedding.weight[0].abs().sum() == 0  # type: ignore[union-attr]


def test_an_embedding_with_too_few_rows_is_refused(root: Path) -> None:
    data = Sent140(root=str(root), partition=ByUser(5, 20), vocab_size=30)
    with pytest.raises(FederationError, match=r"BiLSTM cannot take inputs of shape \(40,\) with numbers up to 31"):
        fit(FedAvg(small(num_embeddings=31)), data, rounds=1)
