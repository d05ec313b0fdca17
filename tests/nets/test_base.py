"""FedNet: nets round-trip through descriptions in plain values."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from fl_lightning.errors import FederationError
from fl_lightning.nets import MLP, NETS, FedNet, LeNet5


class Required(FedNet):
    """A net of a user, with a required argument and one passed through."""

    def __init__(self, width: int, *, classes: int = 2, **more: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.more = more


class Taller(LeNet5):
    """A user's subclass of a library net, with its own arguments."""

    def __init__(self, extra: int, num_classes: int = 5) -> None:
        super().__init__(num_classes=num_classes)
        self.top = nn.Linear(num_classes, extra)


class Wraps(FedNet):
    """A net that takes an object no plain value stands for."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body


class Positional(FedNet):
    """A net whose arguments have no names."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths


@pytest.mark.parametrize("kind", NETS.values(), ids=NETS.keys())
def test_spec_round_trip(kind: type[FedNet]) -> None:
    net = kind(num_classes=7)  # type: ignore[call-arg]
    spec = json.loads(json.dumps(net.spec))
    again = FedNet.from_spec(spec)
    assert spec["class_path"] == f"fl_lightning.nets.{kind.__name__}"
    assert type(again) is kind
    assert again.spec == net.spec == spec
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}


def test_spec_holds_positional_arguments_and_defaults() -> None:
    assert LeNet5(3).spec["init_args"] == {"in_channels": 3, "num_classes": 10}
    assert MLP(8, (4, 3)).spec["init_args"] == {"in_features": 8, "hidden": [4, 3], "num_classes": 10, "bias": False}


def test_spec_values_are_plain_python() -> None:
    classes = MLP(num_classes=np.int64(3)).spec["init_args"]["num_classes"]
    assert type(classes) is int
    assert classes == 3


def test_spec_is_copied_on_input_and_output() -> None:
    hidden = [4]
    net = MLP(8, hidden)
    hidden.append(5)
    net.spec["init_args"]["hidden"].append(6)
    assert net.spec["init_args"]["hidden"] == [4]


@pytest.mark.parametrize("make", [lambda: Required(3, classes=4, depth=9), lambda: Taller(6), lambda: LeNet5(3, 4)])
def test_spec_survives_copy_and_pickle(make: Callable[[], FedNet]) -> None:
    net = make()
    shallow, deep, pickled = copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    assert shallow.spec == deep.spec == pickled.spec == net.spec
    for name, value in net.state_dict().items():
        assert torch.equal(deep.state_dict()[name], value)
        assert torch.equal(pickled.state_dict()[name], value)


def test_spec_of_users_nets() -> None:
    assert Required(3, depth=9).spec["init_args"] == {"width": 3, "classes": 2, "depth": 9}
    spec = Taller(6).spec
    assert spec == {"class_path": f"{__name__}.Taller", "init_args": {"extra": 6, "num_classes": 5}}
    again = FedNet.from_spec(spec)
    assert isinstance(again, Taller)
    assert again.top.weight.shape == (6, 5)


def test_two_nets_of_one_class_keep_their_own_spec() -> None:
    one, two = MLP(3), MLP(4)
    assert (one.spec["init_args"]["in_features"], two.spec["init_args"]["in_features"]) == (3, 4)


def test_arguments_that_are_not_plain_values_raise_when_the_spec_is_read() -> None:
    net = Wraps(nn.Linear(1, 1))
    with pytest.raises(FederationError, match=r"Wraps cannot be described .*type Linear"):
        _ = net.spec
    with pytest.raises(FederationError, match=r"\*widths have no names"):
        _ = Positional(1, 2).spec
    assert Positional().spec["init_args"] == {}


def test_wrong_arguments_fail_as_python_says() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        MLP(colour=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("MLP", "dict with a class_path"),
        ({"init_args": {}}, "dict with a class_path"),
        ({"class_path": "fl_lightning.nets.Nothing"}, "cannot be imported"),
        ({"class_path": "no_such_package.Net"}, "cannot be imported"),
        ({"class_path": "here.<locals>.Net"}, "cannot be imported"),
        ({"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}, "is not a network"),
        ({"class_path": "fl_lightning.nets.MLP", "init_args": {"colour": 1}}, "cannot be built"),
        ({"class_path": "fl_lightning.nets.MLP", "init_args": [1]}, "cannot be built"),
        ({"class_path": f"{__name__}.Required"}, "cannot be built"),
    ],
)
def test_wrong_spec_is_one_sentence(spec: Any, says: str) -> None:
    with pytest.raises(FederationError, match=says) as caught:
        FedNet.from_spec(spec)
    assert "\n" not in str(caught.value)


def test_short_names_resolve_on_the_command_line() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--net", type=FedNet)
    made = parser.instantiate(parser.parse_args(["--net=MLP", "--net.hidden=[5,4]", "--net.in_features=64"])).net
    assert isinstance(made, MLP)
    assert made.fc2.weight.shape == (4, 5)
    assert resolve_name(parser.parse_args(["--net=LeNet5"]).net.class_path) is LeNet5
