"""Run by test_ddp.py: one federated run over several processes, written to a file."""

from __future__ import annotations

import sys

import torch

from fl_lightning.callbacks import DifferentialPrivacyCallback, LedgerCallback
from fl_lightning.methods import SCAFFOLD, FedAvg
from tests.support import blobs, fit, mlp

KINDS = {"FedAvg": FedAvg, "SCAFFOLD": SCAFFOLD, "private": FedAvg}


def main(kind: str, engine: str, devices: int, path: str) -> None:
    method = KINDS[kind](mlp(), lr=0.1, epochs=2, batch_size=8, engine=engine)
    data = blobs((40, 27, 33, 16, 21), fraction=0.8)
    ledger = LedgerCallback(folder=f"{path}.ledger")
    callbacks = [
        ledger,
        *([DifferentialPrivacyCallback(1.0, 0.5, reproducible_noise=True)] if kind == "private" else []),
    ]
    strategy = "ddp" if devices > 1 else "auto"
    run = fit(method, data, rounds=3, devices=devices, strategy=strategy, callbacks=callbacks)
    private = {f"{c}.{k}": v for c in method.snapshots for k, v in method.snapshots[c].private.items()}
    torch.save(
        {
            "weights": {**dict(method.net.state_dict()), **private},
            "acc": float(run.callback_metrics["test/acc"]),
            "up": method.bytes_up,
            "ledger": [ledger.total("up"), ledger.total("down")],
            "choice": method.engine.choice,
        },
        f"{path}.{run.global_rank}",
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
