"""Personalised, fair and private federated learning as PyTorch Lightning modules.

A federated run is one stock ``Trainer.fit``::

    from lightning.pytorch import Trainer
    from fl_lightning.datamodules import MNIST, Unimodal
    from fl_lightning.methods import FedAvg
    from fl_lightning.nets import MLP

    data = MNIST(partition=Unimodal(clients=100, classes_per_client=2), fraction=0.1)
    Trainer(max_epochs=100).fit(FedAvg(MLP(), lr=0.04, epochs=5), data)
"""

from fl_lightning.noise import hush

hush()
