"""Runs that are stopped at any point, in any way, and resumed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.module import FederatedModule
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, blobs, fit, weights

ROUNDS = 4


class Stop(Callback):
    """Stops the run in a given way at the n-th call of a hook."""

    def __init__(self, hook: str, times: int, act: Any) -> None:
        self.times, self.act = times, act
        setattr(self, hook, self._count)

    def _count(self, *args: Any) -> None:
        self.times -= 1
        if self.times == 0:
            self.act()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("client lost")


def make(kind: type[FederatedModule], **kwargs: Any) -> FederatedModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LeNetBN(num_classes=CLASSES)
    return kind(net, lr=0.1, epochs=2, batch_size=8, momentum=0.5, **{"engine": "stacked", **kwargs})


def run(method: FederatedModule, folder: Path, *callbacks: Callback, ckpt_path: str | None = None) -> None:
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    data = blobs((19, 9, 16, 8), (1, 28, 28), fraction=0.5)
    fit(method, data, ROUNDS, ckpt_path, precision="32-true", enable_checkpointing=True, callbacks=[saver, *callbacks])


def stopped(method: FederatedModule, folder: Path, *callbacks: Callback, early: bool = False) -> None:
    """Run in a forked child, which may die in any way; its last output is in the folder's ``stderr``.

    Unless it is stopped ``early``, maybe in its first round, it must have left a checkpoint: else nothing is resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        with open(folder / "stderr", "w") as said:
            try:
                sys.stdout = sys.stderr = said
                signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where Ctrl-C is ignored
                run(method, folder, *callbacks)
            except BaseException:
                traceback.print_exc(file=said)
            finally:
                said.flush()
                os._exit(0)
    os.waitpid(pid, 0)
    saved = [path.name for path in folder.iterdir()]
    assert early or any(name.endswith(".ckpt") for name in saved), (folder / "stderr").read_text()


def state_of(method: FederatedModule) -> dict[str, torch.Tensor]:
    state = weights(method)
    for client in method.snapshots:
        shot = method.snapshots[client]
        state |= {f"{client}.{name}": value for name, value in shot.private.items()}
        state[f"{client}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
    state["bytes"] = torch.tensor([method.bytes_up, method.bytes_down])
    state["scores"] = method.evaluator.scores["test"]
    return state


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def resumed(kind: type[FederatedModule], folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    last = folder / "last.ckpt"
    method = make(kind, **kwargs)
    run(method, folder, ckpt_path=str(last) if last.exists() else None)
    return state_of(method)
