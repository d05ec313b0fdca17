"""Options of methods that are rarely used, a few at a time: ``FedBPS(net, laplace=Laplace(samples=256))``.

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
    """How a client of FedBPS estimates the variance of its weights.

    Args:
        curvature: mean square of samples' gradients (``fisher``), the same at labels that are drawn from the prediction
            (``ggn``), or Hutchinson's estimate (``hessian``).
        samples: how many of its samples a client uses at most.
        draws: how often ``ggn`` draws labels and ``hessian`` signs; None draws labels once and signs 100 times, as one
            draw of signs, which all samples share, says next to nothing.
        chunk_size: samples that are differentiated at once; it bounds the memory.
    """

    curvature: CurvatureKind = "fisher"
    samples: Count = 1024
    draws: Count | None = None
    chunk_size: Count = 128


@dataclass(frozen=True)
class Trials(Settings):
    """How FedBPS chooses ``p: auto``.

    Args:
        values: what it chooses from.
        rounds: rounds of each trial.
        share: part of every client's training samples that is held out in the trials, unless the data holds some out
            anyway.
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
    """How FedDAF's server infers distributions and makes weights of them.

    Args:
        components: virtual components at first, M; never more than there are clients.
        steps: steps of Adam per fit.
        basis: principal axes of later refits: ``aligned`` to the old ones, ``frozen``, or ``refitted``.
        adaptive: delete components that hardly anybody belongs to.
        weights: use the posterior's means (``expected``) or one draw per refit (``sampled``).
        cap: no client weighs more than this many times 1/K; None does not cap.
    """

    components: Count = 10
    steps: Count = 500
    basis: Basis = "aligned"
    adaptive: bool = True
    weights: Literal["expected", "sampled"] = "expected"
    cap: Annotated[float, AtLeast(1)] | None = 5.0


@dataclass(frozen=True)
class Posterior(Settings):
    """How a client of WAFFLe fits its selection of factors.

    Args:
        temperature: of the relaxed Bernoulli samples.
        kl_weight: weight of the KL terms; 1 is the bound.
        logit_bound: logits of pi are kept within plus and minus this.
    """

    temperature: Positive = 2 / 3
    kl_weight: NonNegative = 1.0
    logit_bound: Positive = 8.0


@dataclass(frozen=True)
class FactorEvaluation(Settings):
    """How clients with factorised layers are evaluated.

    Args:
        dictionary: with the server's ``current`` dictionary, or with the last one that each client received
            (``cached``), which needs no connection.
        adapt_epochs: passes over its data in which a client that never trained fits its own entries.
    """

    dictionary: Dictionary = "current"
    adapt_epochs: Count = 1


@dataclass(frozen=True)
class Evaluation(FactorEvaluation):
    """How clients of WAFFLe are evaluated.

    Args:
        dictionary: with the server's ``current`` dictionary, or with the last one that each client received
            (``cached``), which needs no connection.
        adapt_epochs: passes over its data in which a client that never trained fits pi, c and d.
        selection: with b = pi (``expected``), b = 1[pi >= 1/2] (``threshold``), or one fixed draw of b (``sampled``).
    """

    selection: Literal["expected", "threshold", "sampled"] = "expected"
