"""Runs that are stopped at any point, in any way, and resumed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.module import FederatedModule
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, blobs, fit, untimed

ROUNDS = 4


class Stop(Callback):
    """Stops the run in a given way at the n-th call of a hook, counted over the whole run or within one round."""

    def __init__(self, hook: str, times: int, act: Callable[[], None], round: int | None = None) -> None:
        self.times, self.act, self.round = times, act, round
        setattr(self, hook, self._count)

    def _count(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if self.round in (None, pl_module.completed_rounds):
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


def run(
    method: FederatedModule, folder: Path, *callbacks: Callback, ckpt_path: str | None = None, data: Any = None
) -> None:
    """Fit for four rounds, with a checkpoint after each."""
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    data = data or blobs((19, 9, 16, 8), (1, 28, 28), fraction=0.5)
    fit(method, data, ROUNDS, ckpt_path, precision="32-true", enable_checkpointing=True, callbacks=[saver, *callbacks])


def stopped(method: FederatedModule, folder: Path, *callbacks: Callback, early: bool = False, data: Any = None) -> None:
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
                run(method, folder, *callbacks, data=data)
            except BaseException:
                traceback.print_exc(file=said)
            finally:
                said.flush()
                os._exit(0)
    os.waitpid(pid, 0)
    saved = [path.name for path in folder.iterdir()]
    assert early or any(name.endswith(".ckpt") for name in saved), (folder / "stderr").read_text()


def state_of(method: FederatedModule) -> dict[str, Any]:
    """All that a run leaves: what server and clients hold, every client's own model, scores, bytes and summary."""
    left = {
        "server": dict(method.state_dict()),
        "extras": method.server_extras(),
        "clients": method.exchange.state_dict(),
        "personal": {client: method.personal_state(client) for client in range(len(method.roster))},
        "scores": method.evaluator.state_dict(),
        "bytes": [method.bytes_up, method.bytes_down],
        "summary": untimed(method.summary),
    }
    return dict(_leaves(left))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in pairs:
        yield from _leaves(part, f"{path}/{name}")
    if not isinstance(value, Mapping | list | tuple):
        yield path, value


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Bit for bit; what is no number in one is none in the other."""
    assert left.keys() == right.keys()
    different = [name for name in left if not _equal(left[name], right[name])]
    assert not different


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())
    return bool(left == right or (left != left and right != right))


def resumed(kind: type[FederatedModule], folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    last = folder / "last.ckpt"
    method = make(kind, **kwargs)
    run(method, folder, ckpt_path=str(last) if last.exists() else None)
    return state_of(method)
