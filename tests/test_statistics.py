"""Statistics of normalisation layers and features, and nets that are given normalisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fl_lightning.methods import FedAvg
from fl_lightning.methods.lib.norm_statistics import measured_statistics, model_statistics, without_running
from fl_lightning.nets import CNNCifar, LeNet5, LeNetBN
from fl_lightning.nets.norms import add_norms
from fl_lightning.parties import LocalData
from tests.support import CLASSES, blobs


class Recurrent(nn.Module):
    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, CLASSES)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            x = pack_padded_sequence(x, torch.full((len(x),), 4), batch_first=True)  # type: ignore[assignment]
            return self.head(self.lstm(x)[0].data.view(4, -1, 8).mean(0))
        return self.head(self.lstm(x)[0].mean(1))


def test_running_variance_becomes_a_deviation_and_counters_are_no_statistic() -> None:
    net = LeNetBN()
    net.bn1.running_var.fill_(4.0)
    found = model_statistics(net, net.state_dict())
    assert list(found) == ["bn1", "bn2"]
    assert list(found["bn1"]) == ["mu", "sigma", "beta", "gamma"]
    torch.testing.assert_close(found["bn1"]["sigma"], torch.full((6,), (4 + 1e-5) ** 0.5, dtype=torch.float64))


def test_a_variance_that_noise_made_negative_counts_as_none() -> None:
    net = nn.BatchNorm1d(2)
    state = {**net.state_dict(), "running_var": torch.tensor([-0.5, 0.0])}
    torch.testing.assert_close(model_statistics(net, state)[""]["sigma"], torch.full((2,), 1e-5**0.5).double())


def test_layers_without_running_statistics_must_be_measured() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm((2, 3)))
    assert without_running(net) == ["1", "2"]
    found = model_statistics(net, net.state_dict())
    assert list(found["1"]) == ["beta", "gamma"]
    assert found["2"]["gamma"].shape == (6,)


@pytest.mark.parametrize("size", [5, 300])
def test_measured_over_all_samples_whatever_the_chunks(size: int) -> None:
    data = blobs([size, 4], (3, 6, 6))
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.LayerNorm(80), nn.Linear(80, CLASSES)).double()
    method: Any = FedAvg(net, engine="sequential")  # type: ignore[arg-type]
    batches = (x for x, _ in LocalData(data.federation, 0).batches(7, torch.float64))
    found = measured_statistics(method, method.server_state(), batches, ["0", "2"], "output")
    x = data.federation.inputs[data.federation.train[0]].double()
    torch.testing.assert_close(found["0"]["mu"], net[0](x).mean((0, 2, 3)).detach())
    torch.testing.assert_close(found["0"]["sigma"], net[0](x).std((0, 2, 3), correction=0).detach())
    torch.testing.assert_close(found["2"]["mu"], net[:3](x).mean(0).detach())
    assert not method.functional.skeleton[0]._forward_hooks


@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_outputs(packed: bool) -> None:
    data, net = blobs([40, 4], (4, 3)), Recurrent(packed).double()
    method: Any = FedAvg(net, engine="sequential")  # type: ignore[arg-type]
    index = data.federation.train[0]
    x = data.federation.inputs[index].double()
    found = measured_statistics(method, method.server_state(), x.split(7), ["lstm"], "output")
    out = net.lstm(x)[0]
    torch.testing.assert_close(found["lstm"]["mu"], out.mean((0, 1)).detach())
    normed = add_norms(net)
    assert normed.lstm.norm.normalized_shape == (8,)  # type: ignore[union-attr]
    x = data.federation.inputs[:6].double()
    expected = net.head(normed.lstm.norm(net.lstm(x)[0]).mean(1))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(normed(x), expected)


def test_added_norms_come_right_after_the_convolution() -> None:
    """LeNet-5 with added norms computes what lenet_bn computes; the original is left alone."""
    plain, bn = LeNet5(), LeNetBN()
    normed = add_norms(plain)
    assert [n for n, _ in plain.named_modules() if "norm" in n] == []
    state = {
        name.replace("conv1.norm", "bn1").replace("conv2.norm", "bn2"): v for name, v in normed.state_dict().items()
    }
    bn.load_state_dict(state)
    x = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(normed(x), bn(x))
    assert [n for n, _ in add_norms(CNNCifar()).named_modules() if n.endswith("norm")] == ["conv1.norm", "conv2.norm"]
