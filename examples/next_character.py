"""Next character: one small Transformer for the authors of several files, LoRA adapters that never leave their homes.

Authors are modules of Python's library, so that nothing has to be downloaded.

python examples/next_character.py
"""

import csv
import heapq
import inspect
import json
import shlex

import torch
from lightning.pytorch import Trainer

from fl_lightning.datamodules import FromArrays
from fl_lightning.methods import FedAvg, FedPer
from fl_lightning.nets import TransformerDecoder, adapters, lora
from fl_lightning.tasks import NextToken

AUTHORS, LENGTH, LINES = (csv, heapq, json, shlex), 32, 60


def lines() -> tuple[torch.Tensor, list[str]]:
    """Pieces of the authors' texts as character codes, and whose they are."""
    pieces, authors = [], []
    for author in AUTHORS:
        text = inspect.getsource(author).encode("ascii", "replace")
        starts = range(0, min(len(text) - LENGTH - 1, LINES * LENGTH), LENGTH)
        pieces += [list(text[start : start + LENGTH + 1]) for start in starts]
        authors += [author.__name__] * len(starts)
    return torch.tensor(pieces), authors


def main(rounds: int = 10) -> dict[str, float]:
    """Train one model for all; then, from it, adapters that stay at home. Returns both perplexities."""
    codes, authors = lines()
    options = {"task": NextToken(), "optimizer": "Adam", "batch_size": 10, "engine": "sequential", "seed": 0}
    torch.manual_seed(0)
    shared = FedAvg(TransformerDecoder(128, LENGTH, width=32, depth=1, heads=2), lr=0.01, epochs=2, **options)
    found = {}

    def train(name: str, method: FedAvg) -> None:
        data = FromArrays(codes[:, :-1], codes[:, 1:], clients=authors, seed=0)
        trainer = Trainer(max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False,
                          enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(method, data)
        found[name] = float(trainer.callback_metrics["val/perplexity"])
        worst = float(trainer.callback_metrics["val/perplexity_worst10"])
        print(f"{name:<24} {found[name]:10.2f} {worst:12.2f} {method.bytes_up / 1e6:8.3f}")

    train("one model", shared)
    net = lora(shared.net, rank=4, train=())
    home = [name for name in adapters(net) if name.startswith("blocks.")]
    own = FedPer(net, personal=home, lr=0.01, epochs=2, **options)
    train("adapters kept at home", own)
    return found


if __name__ == "__main__":
    main()
