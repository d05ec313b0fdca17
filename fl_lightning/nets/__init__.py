"""Networks, one file per family; the last fully connected layer is called ``head`` in all of them."""

from fl_lightning.nets.adapters import LoRA, LoRALinear, adapters, freeze, load_weights, lora
from fl_lightning.nets.base import Asked, FedNet, LossNet
from fl_lightning.nets.cifar import DenseNet121, MobileNetV2, ResNet18
from fl_lightning.nets.cnn import CNNCifar, CNNFashion
from fl_lightning.nets.convert import group_count, group_norm, replace_modules
from fl_lightning.nets.dla import DLA, DLASimple, DLATiny
from fl_lightning.nets.dropout import StreamDropout, noise_shapes, stream_dropout
from fl_lightning.nets.factorized import (
    FactorizedConv2d,
    FactorizedLayer,
    FactorizedLinear,
    factorize,
    factorized_layers,
)
from fl_lightning.nets.lenet import LeNet5, LeNet5Cifar, LeNet5Classic, LeNetBN, WideLeNet
from fl_lightning.nets.lstm import BiLSTM
from fl_lightning.nets.mlp import MLP
from fl_lightning.nets.tabular import EmbeddingBagNet, as_codes
from fl_lightning.nets.thin_resnet import ResNet20, ResNet32, ResNet44, ResNet56
from fl_lightning.nets.transformer import TransformerDecoder, TransformerEncoder, ViTTiny
from fl_lightning.nets.unet import UNet

#: Networks by their names in the papers; each class without arguments is the network of that name.
NETS: dict[str, type[FedNet]] = {
    "mlp_mnist": MLP,
    "cnn_fmnist": CNNFashion,
    "cnn_cifar": CNNCifar,
    "lenet5": LeNet5,
    "lenet5_classic": LeNet5Classic,
    "lenet_bn": LeNetBN,
    "lenet5_cifar": LeNet5Cifar,
    "resnet18": ResNet18,
    "densenet121": DenseNet121,
    "mobilenetv2": MobileNetV2,
    "bilstm": BiLSTM,
    "dla": DLA,
    "dla_simple": DLASimple,
    "dla_tiny": DLATiny,
    "wide_lenet": WideLeNet,
    "resnet20": ResNet20,
    "resnet32": ResNet32,
    "resnet44": ResNet44,
    "resnet56": ResNet56,
}

__all__ = [
    "DLA",
    "MLP",
    "NETS",
    "Asked",
    "BiLSTM",
    "CNNCifar",
    "CNNFashion",
    "DLASimple",
    "DLATiny",
    "DenseNet121",
    "EmbeddingBagNet",
    "FactorizedConv2d",
    "FactorizedLayer",
    "FactorizedLinear",
    "FedNet",
    "LeNet5",
    "LeNet5Cifar",
    "LeNet5Classic",
    "LeNetBN",
    "LoRA",
    "LoRALinear",
    "LossNet",
    "MobileNetV2",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "ResNet44",
    "ResNet56",
    "StreamDropout",
    "TransformerDecoder",
    "TransformerEncoder",
    "UNet",
    "ViTTiny",
    "WideLeNet",
    "adapters",
    "as_codes",
    "factorize",
    "factorized_layers",
    "freeze",
    "group_count",
    "group_norm",
    "load_weights",
    "lora",
    "noise_shapes",
    "replace_modules",
    "stream_dropout",
]
