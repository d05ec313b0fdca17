"""Epsilon, accuracy and the strength of membership inference on Digits, by the noise at the server, with a picture.

    python benchmarks/budget.py --out budget.json --picture budget.png

Twenty clients that know their few samples by heart; the attack is the strongest, as chosen on shadows, of those on the
global model that clients receive. Delta is 1/200.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.pytorch import seed_everything

from fl_lightning.callbacks import DifferentialPrivacyCallback, MembershipInferenceCallback
from fl_lightning.datamodules import IID, Digits
from fl_lightning.methods import FedAvg
from fl_lightning.nets import MLP
from fl_lightning.privacy.figures import budget_figure
from fl_lightning.quiet import quiet_trainer
from fl_lightning.sheet import markdown_head, markdown_row

NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)


def measured(noise: float, rounds: int, shadows: int, folder: str) -> dict[str, float]:
    seed_everything(0, verbose=False)
    defence = DifferentialPrivacyCallback(clip=1.0, noise_multiplier=noise)
    attack = MembershipInferenceCallback(["other_client"], shadows=shadows, folder=folder)
    trainer = quiet_trainer(
        max_epochs=rounds,
        limit_val_batches=0,
        callbacks=[defence, attack],
    )
    data = Digits(partition=IID(20, train_samples=25))
    method = FedAvg(MLP(64, (100,), 10), lr=0.1, epochs=5, batch_size=5, engine="stacked", weighting="uniform")
    trainer.fit(method, data)
    assert attack.report is not None
    best = attack.report.strongest(view="other_client")
    trainer.callbacks.remove(attack)
    (found,) = trainer.test(method, datamodule=data, verbose=False)
    assert best is not None
    return {
        "noise": noise,
        "epsilon": defence.epsilon(),
        "accuracy": 100 * found["test/acc"],
        "AUROC": best["auroc"],
        "AUROC low": best["auroc_low"],
        "AUROC high": best["auroc_high"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shadows", type=int, default=4)
    parser.add_argument("--out", default=None)
    parser.add_argument("--picture", default=None)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rows = []
    with TemporaryDirectory() as folder:
        for noise in NOISE:
            rows.append(measured(noise, arguments.rounds, arguments.shadows, folder))
            if len(rows) == 1:
                print(markdown_head(list(rows[0]), left=0))
            print(markdown_row(f"{value:.4g}" for value in rows[-1].values()), flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))
    if arguments.picture:
        points = [(row["epsilon"], row["accuracy"], row["AUROC"]) for row in rows]
        budget_figure(points, "AUROC of membership inference").savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
