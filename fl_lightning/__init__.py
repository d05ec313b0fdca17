"""Personalised, fair and private federated learning as PyTorch Lightning modules.

A federated run is one stock ``Trainer.fit``::

    from lightning.pytorch import Trainer
    from fl_lightning import MLP, MNIST, FedAvg, Unimodal

    data = MNIST(partition=Unimodal(clients=100, classes_per_client=2), fraction=0.1)
    Trainer(max_epochs=100).fit(FedAvg(MLP(), lr=0.04, epochs=5), data)

Methods, data modules, networks and callbacks can be imported from here; each package is loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fl_lightning.quiet import hush
from fl_lightning.requirements import check_requirements, exported

if TYPE_CHECKING:
    from fl_lightning.callbacks import *  # noqa: F403
    from fl_lightning.datamodules import *  # noqa: F403
    from fl_lightning.methods import *  # noqa: F403
    from fl_lightning.nets import *  # noqa: F403

__version__ = "0.2.0"

check_requirements()
hush()


def __getattr__(name: str) -> Any:
    """Import a public class lazily from its package."""
    package = exported().get(name)
    if package is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{package}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *exported()})
