"""Strike running fits at random, resume them until they end, and compare each with a run that was left alone.

    python benchmarks/chaos.py --kills 30 --folder runs/chaos

A strike is SIGKILL, SIGTERM or Ctrl-C at a random moment, a file-size limit that is reached in the middle of a
checkpoint, a flipped bit in the checkpoint that is resumed from, or a worker that is stopped. A trial is struck several
times; then it runs to its end. It is exact if weights, private state, counters, bytes, scores, curves and ledger are
those of the run that was left alone, bit for bit. Set TMPDIR to another file system than that of the folder: nothing
may depend on it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from fl_lightning.callbacks import FederatedCheckpoint, LedgerCallback, RunRecord, SignalsCallback
from fl_lightning.checkpoints import readable
from fl_lightning.datamodules import TensorFederation
from fl_lightning.engine import make_engine
from fl_lightning.errors import FederationError
from fl_lightning.methods import APFL, IFCA, SCAFFOLD, FedAvg, FedPer
from fl_lightning.nets import MLP

ROUNDS, CLIENTS, FEATURES, CLASSES = 8, 12, 64, 10
METHODS: list[tuple[Any, dict[str, Any]]] = [
    (SCAFFOLD, {}),
    (APFL, {}),
    (FedPer, {}),
    (IFCA, {"clusters": 2}),
    (FedAvg, {}),
]
#: Exit codes of a child: a sentence, and anything else that was raised.
SENTENCE, TRACEBACK = 2, 3


def data() -> TensorFederation:
    """Random classes, sixty samples for each client."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (CLIENTS * 60,), generator=draw)
    x = torch.randn(CLASSES, FEATURES, generator=draw)[y] + torch.randn(len(y), FEATURES, generator=draw)
    starts = range(0, len(y), 60)
    train, test = ([list(range(s + a, s + b)) for s in starts] for a, b in ((0, 45), (45, 60)))
    return TensorFederation(x, y, train=train, test=test, num_classes=CLASSES, fraction=0.5, seed=0)


def method(number: int, workers: int) -> Any:
    """A method, with an engine whose workers count as hung after two seconds."""
    kind, options = METHODS[number % len(METHODS)]
    torch.manual_seed(0)
    net = MLP(in_features=FEATURES, hidden=(256,), num_classes=CLASSES)
    made = kind(net, lr=0.1, epochs=2, batch_size=10, engine="stacked", seed=0, **options)
    made.engine = make_engine("stacked", workers=workers, timeout=2.0)
    return made


def fit(number: int, folder: Path, workers: int) -> None:
    """Run, or go on from the last checkpoint, and write what the run came to."""
    made, last = method(number, workers), folder / "last.ckpt"
    saver = FederatedCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=2, enable_version_counter=False)
    ledger, record = LedgerCallback(folder=str(folder)), RunRecord(str(folder))
    trainer = Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version="csv"),
        callbacks=[ledger, record, SignalsCallback(), saver],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(made, datamodule=data(), ckpt_path=str(last) if last.exists() else None)
    state = dict(made.state_dict())
    for client in made.snapshots:
        shot = made.snapshots[client]
        state |= {f"{client}.{name}": value for name, value in shot.private.items()}
        state[f"{client}.counters"] = torch.tensor([shot.rounds, shot.steps, shot.last_round])
    state |= {"bytes": torch.tensor([made.bytes_up, made.bytes_down]), "scores": made.evaluator.scores["val"]}
    curves = {name: curve for name, curve in sorted(record.curves.items()) if not name.startswith("time/")}
    torch.save({"state": state, "curves": curves, "ledger": (folder / "ledger.csv").read_bytes()}, folder / "end.pt")


def child(number: int, folder: Path, workers: int = 1, limit: int | None = None) -> int:
    """Start a run in a fork, and return its process."""
    process = os.fork()
    if process:
        return process
    code = TRACEBACK
    os.setsid()
    with open(folder / "said.txt", "a") as said:
        sys.stdout = sys.stderr = said
        os.dup2(said.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("default")  # a fallback is told in one
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            fit(number, folder, workers)
            code = 0
        except FederationError as error:
            print(f"sentence: {error}", file=said)
            code = SENTENCE
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc(file=said)
        finally:
            said.flush()
            os._exit(code)


def ended(process: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Chaos:
    """Trials of one kind of strike after the other.

    Args:
        folder: where runs write.
        seed: of the random moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.references: dict[int, Any] = {}
        self.seconds: dict[int, float] = {}
        self.counts: dict[str, Counter[str]] = {}
        self.waits: list[float] = []

    def left_alone(self, number: int) -> Any:
        """Result of a run that nobody strikes."""
        number %= len(METHODS)
        if number not in self.references:
            folder = self.fresh(f"alone{number}")
            began = time.monotonic()
            code = ended(child(number, folder))
            assert code == 0, (folder / "said.txt").read_text()
            self.seconds[number] = time.monotonic() - began
            self.references[number] = torch.load(folder / "end.pt", weights_only=True)
        return self.references[number]

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def trial(self, kind: str, number: int, strikes: int) -> int:
        """Strike a run so many times, let it end, and note what it came to; how many strikes hit."""
        counts = self.counts.setdefault(kind, Counter())
        reference, folder, hits = self.left_alone(number), self.fresh(f"{kind}{number}"), 0
        for _ in range(strikes):
            if (folder / "end.pt").exists():
                break
            hits += getattr(self, kind)(number, folder, counts)
            self.look(folder, counts)
        code = 0
        while not (folder / "end.pt").exists() and code == 0:
            code = ended(child(number, folder, 2 if kind == "stop" else 1))
        counts["trials"] += 1
        counts["strikes"] += hits
        outcome = "exact" if code == 0 and same(torch.load(folder / "end.pt", weights_only=True), reference) else "LOST"
        counts[outcome] += 1
        if outcome == "LOST":
            print(f"{kind} {number} was lost, exit {code}: see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        return hits

    def look(self, folder: Path, counts: Counter[str]) -> None:
        """Count checkpoints that are torn."""
        for path in folder.glob("*.ckpt"):
            try:
                with readable(path):
                    torch.load(path, weights_only=True)
            except FederationError:
                counts["torn"] += 1

    def moment(self, number: int) -> None:
        """Wait for some of the time that a run takes."""
        time.sleep(self.random.uniform(0.0, 0.9) * self.seconds[number % len(METHODS)])

    def kill(self, number: int, folder: Path, counts: Counter[str]) -> int:
        """SIGKILL."""
        process = child(number, folder)
        self.moment(number)
        os.kill(process, signal.SIGKILL)
        return int(ended(process) == -signal.SIGKILL)

    def term(self, number: int, folder: Path, counts: Counter[str], what: int = signal.SIGTERM) -> int:
        """SIGTERM; before the fit it ends the process by itself."""
        process = child(number, folder)
        self.moment(number)
        began = time.monotonic()
        os.kill(process, what)
        code = ended(process)
        self.waits.append(time.monotonic() - began)
        counts[f"exit {code}"] += 1
        return int(code != 0)

    def interrupt(self, number: int, folder: Path, counts: Counter[str]) -> int:
        """Ctrl-C."""
        return self.term(number, folder, counts, signal.SIGINT)

    def disk(self, number: int, folder: Path, counts: Counter[str]) -> int:
        """A file-size limit somewhere within the size of a checkpoint."""
        sizes = [path.stat().st_size for path in self.folder.glob("alone*/last.ckpt")]
        code = ended(child(number, folder, limit=self.random.randrange(1000, max(sizes))))
        counts["sentence" if code == SENTENCE else f"exit {code}"] += 1
        return int(code != 0)

    def flip(self, number: int, folder: Path, counts: Counter[str]) -> int:
        """SIGKILL, then a flipped bit where the run goes on from: it must fall back, or say that it cannot."""
        self.kill(number, folder, counts)
        path = folder / "last.ckpt"
        if not path.exists():
            return 0
        content = bytearray(path.read_bytes())
        place = self.random.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        before = len((folder / "said.txt").read_text())
        code, said = ended(child(number, folder)), (folder / "said.txt").read_text()[before:]
        if code == SENTENCE:  # nothing else was there
            path.unlink()
        refused = code == SENTENCE and "cannot be read" in said
        counts["fell back" if "goes on from" in said else "refused" if refused else "NOT NOTICED"] += 1
        return 1

    def stop(self, number: int, folder: Path, counts: Counter[str]) -> int:
        """SIGSTOP for a worker."""
        process = child(number, folder, 2)
        workers: list[int] = []
        while len(workers) < 2 and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            workers = [pid for pid in grandchildren(process) if pid != process]
            time.sleep(0.05)
        while not (folder / "last.ckpt").exists() and runs(process, 0.05):  # a worker has minutes to begin
            pass
        self.moment(number)
        if workers:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(workers), signal.SIGSTOP)
        code = ended(process)
        counts["sentence" if code == SENTENCE else f"exit {code}"] += 1
        counts["left behind"] += sum(map(runs, workers))
        return int(code != 0)


def grandchildren(process: int) -> list[int]:
    """The workers of a run: what the server that forks them has forked."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            parents = [int(entry.name)]
            for _ in range(2):
                parents.append(parent_of(parents[-1]))
            if parents[2] == process:
                found.append(parents[0])
    return found


def parent_of(process: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def runs(process: int, seconds: float = 0.5) -> bool:
    """Whether a process is there a little later."""
    time.sleep(seconds)
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def same(left: Any, right: Any) -> bool:
    """Whether two runs came to the same, bit for bit."""
    if left["state"].keys() != right["state"].keys() or left["ledger"] != right["ledger"]:
        return False
    equal = all(torch.equal(left["state"][name], value) for name, value in right["state"].items())
    return equal and left["curves"] == right["curves"]


def main() -> None:
    """Strike as often as was asked for, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"kill": 30, "term": 10, "interrupt": 5, "disk": 5, "flip": 10, "stop": 2}
    for kind, often in kinds.items():
        parser.add_argument(f"--{kind}s", type=int, default=often, help=f"strikes of this kind (default: {often})")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chaos = Chaos(options.folder.absolute(), options.seed)
    for kind in kinds:
        wanted, number = getattr(options, f"{kind}s"), 0
        while wanted > 0:
            wanted -= max(chaos.trial(kind, number, min(3, wanted)), 1)
            number += 1
        print(kind, dict(chaos.counts.get(kind, {})), flush=True)
    waits = sorted(chaos.waits)
    if waits:
        print(f"seconds from a signal to the end: median {waits[len(waits) // 2]:.2f}, most {waits[-1]:.2f}")
    if options.json is not None:
        found = {"seed": options.seed, "signal_seconds": [round(w, 3) for w in waits], "kinds": chaos.counts}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
