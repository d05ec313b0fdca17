"""Fed-GN: FedAvg on the converted net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_lightning.methods import FedAvg, FedGN
from fl_lightning.nets import BiLSTM, LeNet5, LeNetBN, ResNet18, group_norm
from tests.support import CLASSES, blobs, fit, largest_difference, weights


def net() -> LeNetBN:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LeNetBN(num_classes=CLASSES)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_equals_fedavg_on_the_converted_net(engine: str) -> None:
    one, other = FedGN(net(), lr=0.1, batch_size=8, engine=engine), FedAvg(group_norm(net()), lr=0.1, batch_size=8)
    other.engine = one.engine
    for method in (one, other):
        fit(method, blobs((17, 9, 16), (1, 28, 28)), rounds=2)
    assert largest_difference(weights(one), weights(other)) == 0.0
    assert [one.snapshots[client].steps for client in range(3)] == [6, 4, 4]  # a batch of one is no trouble


def test_no_buffers_and_no_dependence_on_the_batch() -> None:
    method = FedGN(net())
    names = dict(method.net.named_parameters()).keys()
    assert method.net.state_dict().keys() == names
    assert not any("running" in name for name in method.shared_names)
    x = torch.randn(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        together, _ = method.call(method.server_state(), x, training=training)
        alone, _ = method.call(method.server_state(), x[:1], training=training)
        torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("buffers", ["average", "keep", "reset"])
def test_a_checkpoint_is_loaded_with_the_converted_net(buffers: str, tmp_path: Path) -> None:
    method = FedGN(net(), groups=2, lr=0.1, batch_size=8, buffers=buffers, engine="stacked")  # type: ignore[arg-type]
    run = fit(method, blobs((17, 9), (1, 28, 28)), rounds=1, precision="32-true")
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = FedGN.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.net.bn2.num_groups == 2  # type: ignore[union-attr]
    assert largest_difference(weights(loaded), weights(method)) == 0.0


def test_a_layer_has_up_to_32_groups() -> None:
    assert FedGN(ResNet18()).net.body.stem[1].num_groups == 32  # type: ignore[union-attr, index]


def test_nets_without_batch_normalisation() -> None:
    with pytest.warns(UserWarning, match="LeNet5 has no normalisation layer, so FedGN is FedAvg: use a net with"):
        FedGN(LeNet5())
    FedGN(BiLSTM(10, 4, 2))  # LayerNorm is a GroupNorm with one group
