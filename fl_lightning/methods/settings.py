"""Groups of rarely used options of methods, such as ``FedBPS(net, laplace=Laplace(samples=256))``.

A method takes one of these objects or a dict of its options; on the command line ``--model.laplace.samples 256``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fl_lightning.arguments import Settings
from fl_lightning.errors import FederationError
from fl_lightning.methods.lib.fusion import Basis
from fl_lightning.methods.lib.laplace import CurvatureKind
from fl_lightning.ranges import AtLeast, Count, NonNegative, Part, Positive, Share

Dictionary = Literal["current", "cached"]


@dataclass(frozen=True)
class Laplace(Settings):
    """Options of FedBPS's variance estimates.

    Args:
        curvature: mean square of samples' gradients (``fisher``), the same at labels drawn from the prediction
            (``ggn``), or Hutchinson's estimate (``hessian``).
        samples: maximum number of samples that a client uses.
        draws: number of draws of labels (``ggn``) or signs (``hessian``); None draws labels once and signs 100 times,
            because a single draw of signs, shared by all samples, is too noisy.
        chunk_size: number of samples differentiated at once; bounds the memory.
    """

    curvature: CurvatureKind = "fisher"
    samples: Count = 1024
    draws: Count | None = None
    chunk_size: Count = 128


@dataclass(frozen=True)
class Trials(Settings):
    """Options of FedBPS's trials with ``p: auto``.

    Args:
        values: candidate values.
        rounds: number of rounds of each trial.
        share: fraction of every client's training samples held out in the trials, unless the data already holds out
            validation samples.
    """

    values: tuple[Share, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    rounds: Count = 10
    share: Part = 0.1

    def __post_init__(self) -> None:
        if not self.values:
            raise FederationError("values must have at least one share to try.")
        object.__setattr__(self, "values", tuple(self.values))  # a list, from a configuration file


@dataclass(frozen=True)
class Inference(Settings):
    """Options of the inference and the weights on FedDAF's server.

    Args:
        components: initial number of virtual components, M; at most the number of clients.
        steps: steps of Adam per fit.
        basis: principal axes of later refits: ``aligned`` to the old ones, ``frozen``, or ``refitted``.
        adaptive: delete components with hardly any clients.
        weights: use the posterior's means (``expected``) or one draw per refit (``sampled``).
        cap: maximum weight of a client as a multiple of 1/K; None does not cap.
    """

    components: Count = 10
    steps: Count = 500
    basis: Basis = "aligned"
    adaptive: bool = True
    weights: Literal["expected", "sampled"] = "expected"
    cap: Annotated[float, AtLeast(1)] | None = 5.0


@dataclass(frozen=True)
class Posterior(Settings):
    """Options of the posterior of WAFFLe's selections.

    Args:
        temperature: temperature of the relaxed Bernoulli samples.
        kl_weight: weight of the KL terms; 1 is the bound.
        logit_bound: bound of the absolute logits of pi.
    """

    temperature: Positive = 2 / 3
    kl_weight: NonNegative = 1.0
    logit_bound: Positive = 8.0


@dataclass(frozen=True)
class FactorEvaluation(Settings):
    """Evaluation of clients with factorised layers.

    Args:
        dictionary: use the server's ``current`` dictionary, or the last one that each client received
            (``cached``), which needs no connection.
        adapt_epochs: number of passes over the data to fit own entries of a client that never trained.
    """

    dictionary: Dictionary = "current"
    adapt_epochs: Count = 1


@dataclass(frozen=True)
class Evaluation(FactorEvaluation):
    """Evaluation of WAFFLe's clients.

    Args:
        dictionary: use the server's ``current`` dictionary, or the last one that each client received
            (``cached``), which needs no connection.
        adapt_epochs: number of passes over the data to fit pi, c and d of a client that never trained.
        selection: use b = pi (``expected``), b = 1[pi >= 1/2] (``threshold``), or one fixed draw of b (``sampled``).
    """

    selection: Literal["expected", "threshold", "sampled"] = "expected"
