"""Next-character prediction: one small Transformer for several authors, with private LoRA adapters.

Authors are the most active users in the Sentiment140 file, or modules of Python's standard library without a file.

python examples/next_character.py [data/sentiment140/training.1600000.processed.noemoticon.csv]
"""

import csv
import heapq
import inspect
import json
import shlex
import sys
from collections import defaultdict

import torch
from lightning.pytorch import Trainer

from fl_lightning.datamodules import FromArrays
from fl_lightning.methods import FedAvg, FedPer
from fl_lightning.nets import TransformerDecoder, adapters, lora
from fl_lightning.tasks import NextToken

AUTHORS, LENGTH, LINES = (csv, heapq, json, shlex), 32, 60


def texts(tweets: str | None) -> dict[str, str]:
    """The authors' texts by name."""
    if tweets is None:
        return {author.__name__: inspect.getsource(author) for author in AUTHORS}
    said = defaultdict(list)
    with open(tweets, encoding="latin-1", newline="") as file:
        for row in csv.reader(file):
            said[row[4]].append(row[5])
    return {user: "\n".join(said[user]) for user in heapq.nlargest(8, said, key=lambda user: len(said[user]))}


def lines(tweets: str | None) -> tuple[torch.Tensor, list[str]]:
    """Chunks of the authors' texts as character codes, and their authors."""
    pieces, authors = [], []
    for author, written in texts(tweets).items():
        text = written.encode("ascii", "replace")
        starts = range(0, min(len(text) - LENGTH - 1, LINES * LENGTH), LENGTH)
        pieces += [list(text[start : start + LENGTH + 1]) for start in starts]
        authors += [author] * len(starts)
    return torch.tensor(pieces), authors


def main(rounds: int = 10, tweets: str | None = None) -> dict[str, float]:
    """Train one model for all, then private adapters on top of it; return both perplexities."""
    codes, authors = lines(tweets)
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

    print("                         perplexity  worst author  MB sent")
    train("one model", shared)
    net = lora(shared.net, rank=4, train=())
    home = [name for name in adapters(net) if name.startswith("blocks.")]
    own = FedPer(net, personal=home, lr=0.01, epochs=2, **options)
    train("adapters kept at home", own)
    return found


if __name__ == "__main__":
    main(tweets=sys.argv[1] if len(sys.argv) > 1 else None)
