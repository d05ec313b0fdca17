"""A centrally trained model, for comparison with the federated one."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from fl_lightning import seeding
from fl_lightning.arguments import NamedArguments
from fl_lightning.engine import Job, make_engine
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex, Federation
from fl_lightning.module import FederatedModule
from fl_lightning.wire import State

FILE = "central.pt"


class CentralCallback(NamedArguments, Callback):
    """Base class of callbacks that compare with a central model.

    It starts from the same weights, is trained with the clients' settings, and makes as many passes over all training
    data as the clients together made over theirs. It is trained at the end of the fit, which takes as long as the
    clients' training, and saved to a file, which other runs with the same central model use.

    Attributes:
        initial: initial weights of the run.
        before: number of samples that clients had trained on before the run.

    Args:
        central: file of the central model; None stores it as ``central.pt`` in ``folder``.
        folder: folder of the results; None means the Trainer's log folder.
    """

    #: Uses the clients' private data, so it is refused in deployed runs.
    simulations_only: ClassVar[bool] = True

    def __init__(self, central: str | None = None, folder: str | None = None) -> None:
        self.path, self.folder = central, folder
        self.initial: State = {}
        self.before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that are not federated."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"{type(self).__name__} needs a federated method, not {type(pl_module).__name__}.")
        if stage == "fit":
            self.initial, self.before = {}, 0  # a resumed run restores its own

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the initial weights; a resumed run has them in its checkpoint."""
        if not self.initial:
            assert isinstance(pl_module, FederatedModule)
            self.initial = {name: value.clone() for name, value in pl_module.server_state().items()}
            self.before = samples_trained(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return initial weights and sample count."""
        return {"initial": dict(self.initial), "before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.initial, self.before = dict(state_dict["initial"]), int(state_dict["before"])

    def out(self, trainer: Trainer) -> Path:
        """Return the folder of results; create it if missing."""
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def central_state(self, trainer: Trainer, module: FederatedModule) -> State:
        """Load the central model from its file if it matches the run, else train and save it."""
        federation = module.federation
        samples = samples_trained(module) - self.before
        epochs = module.local.epochs
        passes = max(1, round(epochs * samples / len(federation.train.flat))) if epochs else 0
        path = self.out(trainer) / FILE if self.path is None else Path(self.path)
        key = _key(module, self.initial, passes)
        if path.exists() and (saved := _read(path, module.device))["key"] == key:
            return dict(saved["state"])
        rank_zero_info(f"Training the central model: {passes} epochs on all data.")
        state = train_centrally(module, self.initial, federation, passes)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "state": state}, path)
        return state


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        return {"key": saved["key"], "state": saved["state"]}
    except Exception as error:
        raise FederationError(f"{path} is not a central model: delete it or use another file.") from error


def samples_trained(module: FederatedModule) -> int:
    """Count the samples that clients trained on, once per round, from their snapshots."""
    sizes = module.federation.train.sizes
    return sum(module.snapshots[n].rounds * int(sizes[module.client_of(n)]) for n in module.snapshots)


def train_centrally(module: FederatedModule, initial: State, federation: Federation, passes: int) -> State:
    """Train a model on all clients' training data, with the clients' settings.

    Momentum is reset after ``module.local.epochs`` passes, as in the clients' training.

    Args:
        module: the method, for its net and the clients' settings.
        initial: the weights to start from.
        federation: the data.
        passes: number of passes over all data.
    """
    central = FederatedModule(copy.deepcopy(module.net), engine="sequential", seed=module.seed)  # type: ignore[arg-type]
    central = central.to(module.device)
    pooled, engine = pool(federation), make_engine("sequential")
    state = {name: value.to(module.device) for name, value in initial.items()}
    with torch.inference_mode(False), torch.enable_grad():
        for number, first in enumerate(range(0, passes, module.local.epochs or 1)):
            central.local = replace(module.local, epochs=min(module.local.epochs, passes - first))
            state = engine.train(central, pooled, [Job(0, state)], number)[0].state
    return {name: value.detach() for name, value in state.items()}


def pool(federation: Federation) -> Federation:
    """Return the same data with a single client that owns all of it."""
    train, test = (
        ClientIndex(index.flat, torch.tensor([0, len(index.flat)])) for index in (federation.train, federation.test)
    )
    return replace(federation, train=train, test=test, val=None, label_maps=None, meta={})


def some_tests(module: FederatedModule, number: int) -> Tensor:
    """Return indices of up to ``number`` test samples, always the same ones; of the global test set if there is one."""
    federation = module.federation
    index = federation.test.flat if federation.global_test is None else federation.global_test
    order = seeding.permutation(seeding.stream(module.seed, "compare"), len(index))
    return index[order[:number].to(index.device)]


def _key(module: FederatedModule, initial: State, passes: int) -> str:
    """Return the identity of a central model: data, settings, initial weights, passes."""
    told = {
        "data": module.datamodule.fingerprint,
        "local": module.local.described(),
        "seed": module.seed,
        "passes": passes,
        "entries": sorted(initial),
        "net": repr(module.net),
        "augment": module.federation.augment is not None,
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(initial):
        digest.update(initial[name].double().cpu().numpy().tobytes())
    return digest.hexdigest()
