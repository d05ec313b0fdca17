"""Networks, one file per family; the last fully connected layer is called ``head`` in all of them."""

from fl_lightning.nets.base import FedNet, LossNet
from fl_lightning.nets.cnn import CNNCifar, CNNFashion
from fl_lightning.nets.dropout import StreamDropout, noise_shapes, stream_dropout
from fl_lightning.nets.factorized import (
    FactorizedConv2d,
    FactorizedLayer,
    FactorizedLinear,
    factorize,
    factorized_layers,
)
from fl_lightning.nets.lenet import LeNet5, LeNet5Cifar, LeNetBN
from fl_lightning.nets.mlp import MLP

#: The papers' names of the networks; each class without arguments is the network of that name.
NETS: dict[str, type[FedNet]] = {
    "mlp_mnist": MLP,
    "cnn_fmnist": CNNFashion,
    "cnn_cifar": CNNCifar,
    "lenet5": LeNet5,
    "lenet_bn": LeNetBN,
    "lenet5_cifar": LeNet5Cifar,
}

__all__ = [
    "MLP",
    "NETS",
    "CNNCifar",
    "CNNFashion",
    "FactorizedConv2d",
    "FactorizedLayer",
    "FactorizedLinear",
    "FedNet",
    "LeNet5",
    "LeNet5Cifar",
    "LeNetBN",
    "LossNet",
    "StreamDropout",
    "factorize",
    "factorized_layers",
    "noise_shapes",
    "stream_dropout",
]
