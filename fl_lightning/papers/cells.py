"""Runs of published cells, cached by the hash of their configuration and resumable."""

from __future__ import annotations

import copy
import json
import logging
import os
import pkgutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import Callback, Trainer

from fl_lightning.arguments import fixed_options
from fl_lightning.callbacks.agents import WeighsAgents, local_since
from fl_lightning.errors import FederationError
from fl_lightning.metrics.fairness import scored, worst_decile
from fl_lightning.module import FederatedModule
from fl_lightning.papers.environment import environment
from fl_lightning.papers.tables import Config, config_hash

RESULT, CHECKPOINT, PROGRESS = "result.json", "last.ckpt", "progress.txt"
#: Rounds between checkpoints.
EVERY = 10
#: Number of last rounds whose accuracies are averaged, in addition to the final accuracy.
LAST = 5
#: Accuracies averaged over the last rounds.
ACCURACIES = ("global_test_acc", "local_test_acc")
#: Accuracy in percent; the first round that reaches it is recorded.
GOAL = 98


class Recorder(Callback):
    """Records metrics for the tables after every round; saved in checkpoints, so resumed runs are complete.

    Args:
        path: file for the progress (rounds and accuracy); None writes nothing.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.curves: dict[str, list[float]] = {}
        #: Seconds by round: since the start, of the clients and of the server.
        self.times: dict[str, list[float]] = {}
        self.seconds = 0.0
        self._began = time.perf_counter()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Record the round's accuracies, over all clients and by sub-population, and other metrics."""
        for name, value in {**accuracies(pl_module), **logged(trainer, pl_module)}.items():
            self.curves.setdefault(name, []).append(round(value, 4))
        summary = pl_module.summary
        spent = {"elapsed": self.elapsed(), "clients": summary["time/clients"], "server": summary["time/server"]}
        for name, value in spent.items():
            self.times.setdefault(name, []).append(round(value, 3))
        if self.path is not None:
            rounds = f"{trainer.current_epoch + 1} of {trainer.max_epochs} rounds"
            Path(self.path).write_text(f"{rounds}, {self.curves['local_test_acc'][-1]:.2f}\n")

    def elapsed(self) -> float:
        """Return the seconds of training so far, over all resumptions."""
        return self.seconds + time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        """Return curves and clock."""
        curves, times = ({name: list(curve) for name, curve in of.items()} for of in (self.curves, self.times))
        return {"curves": curves, "times": times, "seconds": self.elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore curves and clock."""
        self.curves, self.seconds = dict(state_dict["curves"]), float(state_dict["seconds"])
        self.times = dict(state_dict.get("times", {}))  # missing in checkpoints of older versions


def folder_of(root: Path, config: Config, seed: int) -> Path:
    """Return the folder of a run's checkpoint and result."""
    return root / f"{config_hash(config)}-seed{seed}"


def cached(root: Path, config: Config, seed: int) -> dict[str, Any] | None:
    """Return the result of a finished run, or None."""
    try:
        result: dict[str, Any] = json.loads((folder_of(root, config, seed) / RESULT).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return result


class Part(NamedTuple):
    """Progress of a run: rounds done, total rounds, and the accuracy so far in percent."""

    rounds: int
    total: int
    accuracy: float


def progress_of(root: Path, config: Config, seed: int) -> Part | None:
    """Return the progress of an unfinished run, or None if unknown."""
    try:
        words = (folder_of(root, config, seed) / PROGRESS).read_text().replace(",", "").split()
        return Part(int(words[0]), int(words[2]), float(words[4]))
    except (FileNotFoundError, IndexError, ValueError):
        return None


class Assembled(Protocol):
    """Trainer, model and data of a run."""

    trainer: Trainer
    model: Any
    datamodule: Any


def run_cell(
    root: Path, config: Config, seed: int, assemble: Callable[[Config], Assembled], threads: int = 1
) -> dict[str, Any]:
    """Run a configuration with a seed, or return its cached result.

    Args:
        root: folder of all runs.
        config: a configuration of ``fl-lightning fit``.
        seed: the seed for ``seed_everything``.
        assemble: builds trainer, model and data from a configuration.
        threads: number of threads of the run.

    Returns:
        Final metrics in the papers' units (percent), accuracy by round, seconds, the engine used and, if there is an
        agent of interest, the weights of all agents for the first one by round.
    """
    done = cached(root, config, seed)
    if done is not None:
        return done
    torch.set_num_threads(threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    folder = folder_of(root, config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    run = assemble(_arguments(config, seed, folder))
    last = folder / CHECKPOINT
    run.trainer.fit(run.model, datamodule=run.datamodule, ckpt_path=str(last) if last.exists() else None)
    result = _result(run.trainer, run.model)
    partial = folder / f"{RESULT}.part"
    partial.write_text(json.dumps(result, indent=1))
    os.replace(partial, folder / RESULT)
    last.unlink(missing_ok=True)
    return result


def accepted(config: Config) -> Config:
    """Copy a recipe's configuration without the options that its method has no choice in; recipes give them to all."""
    arguments = copy.deepcopy(config)
    for option in fixed_options(pkgutil.resolve_name(config["model"]["class_path"])):
        arguments["model"]["init_args"].pop(option, None)
    return arguments


def _arguments(config: Config, seed: int, folder: Path) -> Config:
    """Complete the configuration for a silent run with regular checkpoints."""
    arguments = accepted(config)
    own = arguments.setdefault("trainer", {}).get("callbacks", [])
    saver = {"dirpath": str(folder), "filename": Path(CHECKPOINT).stem, "every_n_epochs": EVERY}
    arguments["seed_everything"] = seed
    arguments["trainer"].update(
        accelerator="cpu",
        default_root_dir=str(folder),  # output folder of callbacks
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            *own,
            {"class_path": "fl_lightning.papers.cells.Recorder", "init_args": {"path": str(folder / PROGRESS)}},
            {"class_path": "ModelCheckpoint", "init_args": {**saver, "enable_version_counter": False}},
        ],
    )
    return arguments


def _result(trainer: Trainer, module: Any) -> dict[str, Any]:
    assert isinstance(module, FederatedModule)
    recorder = next(c for c in trainer.callbacks if isinstance(c, Recorder))  # type: ignore[attr-defined]
    if not recorder.curves:
        raise FederationError("The run ended without a validated round: give it at least one round.")
    state, final, scores = (
        module.server_state(),
        accuracies(module),
        100 * module.evaluator.scores[module.federation.validated],
    )
    last = {name: curve[-LAST:] for name, curve in recorder.curves.items() if name in ACCURACIES}
    curve = recorder.curves["local_test_acc"]
    metrics = {
        **{name: curve[-1] for name, curve in last.items()},
        **final,
        **{f"{name}_last{LAST}": sum(curve) / len(curve) for name, curve in last.items()},
        "best_acc": max(curve),
        "variance": float(scored(scores).var(correction=0)),
        "worst_tenth": float(worst_decile(scores)),
        "parameters": sum(state[name].numel() for name in module.shared_names),
        "bytes_per_round": (module.bytes_up + module.bytes_down) / len(curve),
    }
    if max(curve) >= GOAL:
        metrics[f"rounds_to_{GOAL}"] = 1 + next(i for i, accuracy in enumerate(curve) if accuracy >= GOAL)
    if "minority" in final:
        metrics["gap"] = final["majority"] - final["minority"]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        metrics |= callback.run_metrics() if hasattr(callback, "run_metrics") else {}
    more: dict[str, Any] = {}
    if isinstance(module, WeighsAgents):
        weights = module.weight_history()[:, 0].cpu()
        since = local_since(weights, module.agents[0])
        metrics |= {} if since is None else {"local_since": since}
        more["weights"] = [[round(weight, 4) for weight in by_client] for by_client in weights.tolist()]
    return {
        **more,
        "method": type(module).__name__,
        "metrics": metrics,
        "rounds": len(curve),
        "seconds": round(recorder.elapsed(), 1),
        "engine": module.engine.choice,
        "bytes": [module.bytes_up, module.bytes_down],
        "curves": recorder.curves,
        "times": recorder.times,
        "clients": [None if value.isnan() else round(float(value), 4) for value in scores],
        "modes": [int(mode) for mode in module.federation.meta.get("mode", [])],
        "environment": environment(),
    }


def logged(trainer: Trainer, module: FederatedModule) -> dict[str, float]:
    """Return the global test accuracy in percent, if there is one, and the round's logged training metrics."""
    found = {"train_loss": module.summary["train/loss"]}
    if "test/global_acc" in trainer.callback_metrics:
        found["global_test_acc"] = 100 * float(trainer.callback_metrics["test/global_acc"])
    every = ("train/", "comm/", "clients/", "time/")  # logged by every method
    return found | {name: float(v) for name, v in module.summary.items() if not name.startswith(every)}


def accuracies(module: FederatedModule) -> dict[str, float]:
    """Return the mean accuracy in percent over clients, and over majority and minority if there are two modes.

    Clients that are not evaluated (``eval_only``) are left out.
    """
    federation = module.federation
    scores, modes = 100 * module.evaluator.scores[federation.validated], federation.meta.get("mode")
    found = {"local_test_acc": float(scores.nanmean())}
    if modes is not None and len(set(modes)) == 2:
        members = [scores[torch.tensor([m == mode for m in modes])] for mode in set(modes)]
        minority, majority = sorted(members, key=len)
        found |= {"majority": float(majority.nanmean()), "minority": float(minority.nanmean())}
    return found
