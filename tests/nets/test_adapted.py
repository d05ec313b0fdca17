"""Transformers, U-Net, embeddings of codes and LoRA: values, and stacked training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.datamodules import TensorFederation
from fl_lightning.engine import CapturedEngine, Job, make_engine
from fl_lightning.errors import FederationError
from fl_lightning.methods import FedAvg
from fl_lightning.nets import (
    MLP,
    EmbeddingBagNet,
    FedNet,
    LoRA,
    LoRALinear,
    TransformerDecoder,
    TransformerEncoder,
    UNet,
    ViTTiny,
    adapters,
    freeze,
    load_weights,
    lora,
)
from fl_lightning.nets.transformer import Attention
from fl_lightning.tasks import NextToken, Regression, Segmentation, Task
from tests.support.problems import Trained

SIZES = (12, 7, 9)
TOTAL = sum(SIZES)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def whole(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(1))


def decoder(**options: Any) -> TransformerDecoder:
    return TransformerDecoder(9, length=6, width=8, depth=2, heads=2, **options)


CASES: dict[str, tuple[Any, Task | None, Tensor, Tensor]] = {
    "encoder": (
        lambda: TransformerEncoder(9, 3, 6, 8, 1, 2, dropout=0.2), None, whole(9, TOTAL, 6), whole(3, TOTAL)
    ),
    "decoder": (decoder, NextToken(), whole(9, TOTAL, 6), whole(9, TOTAL, 6)),
    "adapted": (lambda: LoRA(decoder(), 2), NextToken(), whole(9, TOTAL, 6), whole(9, TOTAL, 6)),
    "vit": (lambda: ViTTiny(3, 8, 2, 4, 12, 1, 3), None, draw(TOTAL, 2, 8, 8), whole(3, TOTAL)),
    "unet": (lambda: UNet(2, 3, (4, 8)), Segmentation(), draw(TOTAL, 2, 8, 8), whole(3, TOTAL, 8, 8)),
    "codes": (lambda: EmbeddingBagNet(9, 1, 4, (6,)), Regression(), whole(9, TOTAL, 3), draw(TOTAL)),
}  # fmt: skip


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@pytest.mark.parametrize("name", CASES)
def test_stacked_training_equals_sequential(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedEngine, "seldom", 0)
    make, task, inputs, targets = CASES[name]
    parts = list(torch.arange(TOTAL).split(SIZES))
    data = TensorFederation(inputs, targets, train=[p[2:] for p in parts], test=[p[:2] for p in parts]).federation
    net = seeded(make).double()
    options: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4, "seed": 0}
    module = FedAvg(net, **options) if task is None else Trained(net, task, **options)
    jobs = [Job(client, module.server_state()) for client in range(3)]
    alone, *others = [make_engine(e).train(module, data, jobs, 0) for e in ("sequential", "stacked", "captured")]
    for other in others:
        for one, same in zip(alone, other, strict=True):
            for entry, value in one.state.items():
                torch.testing.assert_close(same.state[entry], value, rtol=0, atol=1e-10)
    trained = set(module.trainable_names)
    moved = {name for name, value in alone[0].state.items() if not torch.equal(value, jobs[0].state[name])}
    assert moved == trained


def test_attention_equals_torch() -> None:
    ours, other = Attention(12, 3).double(), nn.MultiheadAttention(12, 3, batch_first=True).double()
    other.in_proj_weight, other.in_proj_bias = ours.qkv.weight, ours.qkv.bias
    other.out_proj.weight, other.out_proj.bias = ours.out.weight, ours.out.bias
    x, present = draw(2, 5, 12).double(), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    torch.testing.assert_close(ours(x, present), other(x, x, x, key_padding_mask=~present)[0])
    ours.causal = True
    mask = torch.ones(5, 5).bool().triu(1)
    torch.testing.assert_close(ours(x), other(x, x, x, attn_mask=mask)[0])


def test_a_decoder_is_causal() -> None:
    net, tokens = seeded(decoder), whole(9, 1, 6)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 9
    same = (net(tokens) == net(changed)).all(-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 2


def test_padding_changes_nothing() -> None:
    encoder = seeded(lambda: TransformerEncoder(9, 3, 8, 8, 2, 2)).double()
    short = torch.tensor([[3, 5, 2]])
    torch.testing.assert_close(encoder(short), encoder(F.pad(short, (0, 4))))
    assert torch.isfinite(encoder(torch.zeros(1, 4, dtype=torch.int64))).all()
    bag = EmbeddingBagNet(9, 2, 4)
    torch.testing.assert_close(bag(short), bag(F.pad(short, (0, 4))))


def test_codes_are_an_embedding_bag() -> None:
    net, codes = EmbeddingBagNet(9, 2, 4, ()), torch.tensor([[3, 5, 2]])
    torch.testing.assert_close(net(codes), net.head(F.embedding_bag(codes, net.embedding.weight, mode="mean")))


def test_sizes() -> None:
    count = {name: sum(p.numel() for p in net.parameters()) for name, net in (("vit", ViTTiny()), ("unet", UNet()))}
    # Twelve widths squared and thirteen widths of a block, the patches, token, places, last LayerNorm and head.
    assert count["vit"] == 6 * (12 * 192**2 + 13 * 192) + 49 * 192 + 192 + 65 * 192 + 2 * 192 + 193 * 10
    double = [(3, 16), (16, 32), (32, 64), (96, 32), (48, 16)]
    assert count["unet"] == sum(9 * a * b + 9 * b * b + 6 * b for a, b in double) + 17 * 2


def test_lora_starts_as_the_net_and_learns_a_low_rank_update() -> None:
    plain = seeded(lambda: MLP(6, (8, 7), 3, bias=True)).double()
    net, x = lora(plain, rank=2, alpha=4.0), draw(5, 6).double()
    assert torch.equal(net(x), plain(x))
    assert all(p.requires_grad for p in plain.parameters())
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert trained == {*adapters(net), "head.weight", "head.bias"}
    layer = net.get_submodule("fc1")
    assert isinstance(layer, LoRALinear)
    nn.init.normal_(layer.up)
    change = 2.0 * layer.up @ layer.down
    assert int(torch.linalg.matrix_rank(change)) == 2
    torch.testing.assert_close(layer(x), F.linear(x, plain.get_submodule("fc1").weight + change, layer.bias))
    torch.testing.assert_close(layer.merged()(x), layer(x))
    assert plain.state_dict().keys() <= net.state_dict().keys()


def test_layers_are_chosen_by_name() -> None:
    net = lora(decoder(), 2, layers=["blocks.*.attention.qkv"], train=())
    assert adapters(net) == [f"blocks.{i}.attention.qkv.{part}" for i in (0, 1) for part in ("down", "up")]
    assert {name for name, p in net.named_parameters() if p.requires_grad} == set(adapters(net))
    assert {n for n, p in freeze(decoder(), ["norm"]).named_parameters() if p.requires_grad} == {
        "norm.weight",
        "norm.bias",
    }


def test_an_adapted_net_round_trips_through_its_spec(tmp_path: Path) -> None:
    base = seeded(decoder)
    torch.save(base.state_dict(), tmp_path / "base.pt")
    net = LoRA(decoder(), 3, ["blocks.1.*"], weights=str(tmp_path / "base.pt"))
    tokens = whole(9, 2, 6)
    assert torch.equal(net(tokens), base(tokens))
    again = FedNet.from_spec(net.spec)
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(tokens), base(tokens))


@pytest.mark.parametrize("kind", ["pt", "ckpt", "safetensors"])
def test_weights_from_a_file(kind: str, tmp_path: Path) -> None:
    base, path = seeded(lambda: MLP(6, (8,), 3)), tmp_path / f"base.{kind}"
    if kind == "safetensors":
        save_file(base.state_dict(), path)
    else:
        state = base.state_dict()
        torch.save({"state_dict": {f"net.{n}": v for n, v in state.items()}} if kind == "ckpt" else state, path)
    other = MLP(6, (8,), 5)
    load_weights(other, path)
    assert torch.equal(other.get_submodule("fc1").weight, base.get_submodule("fc1").weight)
    with pytest.raises(FederationError, match=r"does not fit MLP: it lacks head.weight"):
        load_weights(other, path, strict=True)
    with pytest.raises(FederationError, match=r"has none of its entries in the same shape"):
        load_weights(MLP(7, (9,), 5), path)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Attention(8, 3), r"width=8 must be a multiple of heads=3"),
        (lambda: ViTTiny(size=30), r"size=30 must be a multiple of patch=4"),
        (lambda: decoder()(torch.zeros(1, 7, dtype=torch.int64)), r"Sequences have 7 tokens: set length"),
        (lambda: UNet(widths=()), r"needs one scale at least"),
        (lambda: UNet()(torch.zeros(1, 3, 10, 8)), r"takes images divisible by 4"),
        (lambda: lora(MLP(), 0), r"rank must be 1 or more, not 0"),
        (lambda: lora(MLP(), layers=["conv*"]), r"No fully connected layer is named conv\*.* MLP has fc1, head"),
        (lambda: freeze(MLP(), ["tail"]), r"MLP has no module tail"),
        (lambda: load_weights(MLP(), "nowhere.pt"), r"There is no file nowhere.pt"),
    ],
)
def test_invalid_arguments_are_rejected(call: Any, sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence):
        call()
