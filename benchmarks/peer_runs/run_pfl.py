"""FedAvg with pfl: a model with ``loss`` and ``metrics``, in-memory user datasets, a simulated backend.

pfl slices a user's tensors into batches once for all epochs, so it neither shuffles nor gathers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F
from turns import BATCH, CLIENTS, COHORT, EPOCHS, LR, Turns, client_data, steps_of

from fl_lightning.nets import MLP

PACKAGE = "pfl"
os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # else it looks for a GPU again at every batch


class Net(MLP):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class RoundOver(TrainingProcessCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns, self.steps = turns, 0

    def user(self, client: int) -> PyTorchTensorDataset:
        self.steps += steps_of(client)
        return PyTorchTensorDataset(client_data(client), user_id=str(client))

    def after_central_iteration(self, metrics: Metrics, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        self.turns.round_over(self.steps)
        self.steps = 0
        return False, Metrics()


def run(turns: Turns) -> None:
    net, over = Net(), RoundOver(turns)
    users = FederatedDataset(over.user, get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=turns.rounds,
            evaluation_frequency=turns.rounds,  # the warm-up round alone evaluates
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=EPOCHS, local_learning_rate=LR),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[over],
    )
