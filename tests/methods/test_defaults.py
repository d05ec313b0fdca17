"""Every method runs with nothing but a net."""

from __future__ import annotations

import pytest

from fl_lightning import methods
from fl_lightning.nets import LeNetBN
from tests.support import CLASSES, blobs, fit, mlp

SIZES = (19, 9, 16, 8, 24)


@pytest.mark.parametrize("name", methods.__all__)
@pytest.mark.parametrize("net", ["mlp", "image"])
def test_a_net_is_enough(name: str, net: str) -> None:
    method = getattr(methods, name)(mlp() if net == "mlp" else LeNetBN(num_classes=CLASSES))
    method.engine = type(method)(mlp(), engine="stacked").engine  # `auto` would probe
    data = blobs(SIZES) if net == "mlp" else blobs(SIZES, (1, 28, 28))
    run = fit(method, data, 1)
    assert 0 <= float(run.callback_metrics["test/acc"]) <= 1


def test_default_factors_are_those_of_the_papers() -> None:
    """MNIST's hidden layer of 200 has 120, and the five epochs and the rate of the logits are those of the tables."""
    method = methods.WAFFLe(mlp(hidden=(200,)))
    assert method.factors == {"fc1": 12}  # of 20 inputs
    assert (method.local.epochs, method.vi_lr_mult) == (5, 1000.0)
