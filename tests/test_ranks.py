"""Processes that wait for each other: one that dies, hangs or is told to end takes the others with it, by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import FederationError
from fl_lightning.process import EFFECTS, time_limit, wanted
from fl_lightning.ranks import meet

ROOT = Path(__file__).parent.parent
HEAD = """
import os, signal, sys, time
from fl_lightning.ranks import RankError, meet
"""
WAITS = (
    HEAD
    + """
import torch.distributed as dist
rank, what = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=3)
meet(60)
if rank == 2:
    os.kill(os.getpid(), getattr(signal, what))
try:
    meet(2)
except RankError as error:
    print(error, flush=True)
    os._exit(7)
"""
)
FITS = (
    HEAD
    + """
from pathlib import Path
from fl_lightning import signals
from fl_lightning.callbacks import FederatedCallback, FederatedCheckpoint, SignalsCallback
from fl_lightning.methods import FedAvg
from tests.support import blobs, fit, mlp

class Strike(FederatedCallback):
    def on_round_start(self, trainer, module, round, cohort):
        if round == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    rank, folder = int(os.environ.get("LOCAL_RANK", 0)), Path(sys.argv[1])
    code = 0
    try:
        saver = FederatedCheckpoint(dirpath=folder, enable_version_counter=False)
        callbacks = [Strike(), SignalsCallback(), saver]
        method = FedAvg(mlp(), lr=0.1, engine="sequential")
        fit(method, blobs(), 4, devices=2, strategy="ddp", callbacks=callbacks, enable_checkpointing=True)
    except SystemExit as end:
        code = end.code
    except RankError as error:
        code = f"RankError: {error}"
    (folder / f"code{rank}").write_text(str(code))
    os._exit(0)
"""
)


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FL_LIGHTNING_TIMEOUT": "90"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_is_named(what: str, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    runs = [started(str(script), str(rank), what, str(tmp_path / "meeting")) for rank in range(3)]
    try:
        said = [run.communicate(timeout=240)[0] for run in runs[:2]]
        assert [run.returncode for run in runs[:2]] == [7, 7]
        assert said[0].startswith("Ranks 2 of the run have ended or did not answer for 2 seconds")
        assert "of the run have ended or did not answer" in said[1]
    finally:
        for run in runs:
            run.kill()
            run.communicate()


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_and_leaves_the_last_round(tmp_path: Path) -> None:
    script = tmp_path / "fits.py"
    script.write_text(FITS)
    run = started(str(script), str(tmp_path))
    _, errors = run.communicate(timeout=240)
    end = time.monotonic() + 30
    while not (tmp_path / "code1").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (tmp_path / "code1").read_text() == "143", errors
    assert (tmp_path / "code0").read_text().startswith("RankError: Ranks 1 of the run have ended"), errors
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["fl_lightning"]["rounds"] == 2


def test_one_process_does_not_wait() -> None:
    meet(0.001)


def test_limits_and_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limit() == 1800
    monkeypatch.setenv("FL_LIGHTNING_TIMEOUT", "2.5")
    assert time_limit() == 2.5
    for bad in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("FL_LIGHTNING_TIMEOUT", bad)
        with pytest.raises(FederationError, match=f"must be a number of seconds greater than 0, not '{bad}'"):
            time_limit()
    assert all(map(wanted, EFFECTS))
    monkeypatch.setenv("FL_LIGHTNING_LEAVE", "memory, signals")
    assert [effect for effect in EFFECTS if not wanted(effect)] == ["memory", "signals"]
    monkeypatch.setenv("FL_LIGHTNING_LEAVE", "magic")
    with pytest.raises(FederationError, match="has no magic: it takes memory, mkldnn"):
        wanted("memory")
