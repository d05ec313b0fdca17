"""Client SGD steps per second of FedAvg beside public simulators: pfl, FedLab and Flower, from PyPI.

    python benchmarks/peers.py [--repeats N] [--rounds N] [--environments FOLDER] [--only NAME ...] [--json FILE]

All do the same work on one thread: the workload mnist-mlp of ``fl-lightning bench`` (ten of a hundred clients, five
local epochs, batches of ten). They take turns, each in a process of its own, and a peer in its own environment, which
sees this one's packages, so that torch is the same. In that process the bare PyTorch loop runs right before and after
each of the peer's rounds, so that what else the machine does hits both: only ratios mean anything. A peer's first round
is not timed. A peer that cannot be installed or does not run is skipped, and the result says why.

FedLab and Flower take their batches from the user. They are measured with the ``DataLoader`` of their tutorials, and
once more (-memory) with the slices of tensors in memory that the bare loop takes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import version
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: For every process: one thread, and nobody sends reports of its use.
SETTINGS = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SPEEDS = ("steps_per_second", "plain_steps_per_second")
TIMEOUT = 900


class Row(NamedTuple):
    name: str
    requirement: str | None = None
    memory: bool = False


OURS = "fl-lightning"
ROWS = {
    OURS: Row(OURS),
    "pfl": Row("pfl", "pfl[pytorch]", memory=True),
    "fedlab": Row("fedlab", "fedlab"),
    "fedlab-memory": Row("fedlab", "fedlab", memory=True),
    "flower": Row("flower", "flwr[simulation]"),
    "flower-memory": Row("flower", "flwr[simulation]", memory=True),
}


class SkippedError(Exception):
    """Why a simulator has no figures."""


def call(what: str, *command: str | pathlib.Path) -> None:
    """Run a command to its end; if it fails, its last words are the reason."""
    try:
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, cwd=ROOT, timeout=TIMEOUT, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise SkippedError(f"{what} took more than {TIMEOUT} s") from None
    except subprocess.CalledProcessError as error:
        words = [line for line in (error.stdout + error.stderr).splitlines() if line.strip()]
        raise SkippedError(f"{what} failed: {words[-1] if words else error.returncode}") from None


def interpreter(row: Row, folder: pathlib.Path) -> pathlib.Path:
    """The Python of a peer's environment, which is made and filled when it is not there."""
    if row.requirement is None:
        return pathlib.Path(sys.executable)
    home = (folder / row.name).absolute()
    if not home.exists():
        venv.create(home, with_pip=True)
    for packages in home.glob("lib/python*/site-packages"):
        (packages / "host.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    call(f"pip install {row.requirement}", home / "bin" / "python", "-m", "pip", "install", row.requirement)
    return home / "bin" / "python"


def turn(row: Row, python: pathlib.Path, rounds: int) -> dict[str, Any]:
    """Measure in one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "result.json")
        memory = ["--memory"] if row.memory else []
        call("the run", python, ROOT / "benchmarks" / "peer_runs", row.name, file, "--rounds", str(rounds), *memory)
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the turns."""
    result = {name: statistics.median(one[name] for one in turns) for name in ("ratio", *SPEEDS)}
    result = {name: round(value, 3 if name == "ratio" else None) for name, value in result.items()}
    return {"version": turns[0]["version"], **result, "ratios": [round(one["ratio"], 3) for one in turns]}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':16}{'version':>10}{'ratio':>8}{'steps/s':>10}{'bare':>8}"]
    for name, row in rows.items():
        if "skipped" in row:
            lines.append(f"{name:16}skipped: {row['skipped']}")
        else:
            speeds = f"{row['steps_per_second']:>10}{row['plain_steps_per_second']:>8}"
            lines.append(f"{name:16}{row['version']:>10}{row['ratio']:>8.2f}{speeds}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="how often all take a turn")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a peer that are timed in a turn")
    parser.add_argument("--environments", type=pathlib.Path, default=ROOT / ".benchmarks" / "peers")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--json", type=pathlib.Path, help="write the result to this file")
    args = parser.parse_args()
    pythons: dict[str, pathlib.Path] = {}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    skipped: dict[str, str] = {}
    for repeat in range(args.repeats):
        for name in args.only:
            row = ROWS[name]
            if name in skipped:
                continue
            try:
                if row.name not in pythons:
                    pythons[row.name] = interpreter(row, args.environments)
                turns[name].append(turn(row, pythons[row.name], args.rounds))
                print(f"{repeat + 1}/{args.repeats} {name}: {turns[name][-1]['ratio']:.3f}", flush=True)
            except (SkippedError, OSError, subprocess.CalledProcessError) as error:
                skipped[name] = str(error)
                print(f"{repeat + 1}/{args.repeats} {name} skipped: {error}", flush=True)
    rows = {name: {"skipped": skipped[name]} if name in skipped else summary(turns[name]) for name in args.only}
    result = {
        "command": shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
        "workload": "mnist-mlp",
        "threads": 1,
        "torch": version("torch"),
        "simulators": rows,
    }
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
