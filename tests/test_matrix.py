"""Methods by tasks by optimizers: what runs trains, what does not is refused in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import FederationError
from fl_lightning.methods import FedBPS, FedCluster, FedMA
from fl_lightning.module import FederatedModule
from tests.support import mlp
from tests.support.matrix import METHODS, OPTIMIZERS, PLAIN, PROBLEMS, attempt

#: Every method with every task, and with every optimizer; ``benchmarks/matrix.py`` runs all triples.
CELLS = [
    (method, task, list(OPTIMIZERS)[(i + j) % len(OPTIMIZERS)])
    for i, method in enumerate(METHODS)
    for j, task in enumerate(PROBLEMS)
]
CELLS += [(method, task, "SGD") for method, task, optimizer in CELLS if method in PLAIN and optimizer != "SGD"]


@pytest.mark.parametrize(("method", "task", "optimizer"), CELLS)
def test_every_method_takes_every_task_and_optimizer(method: str, task: str, optimizer: str) -> None:
    found = attempt(method, task, optimizer)
    if method in PLAIN and optimizer != "SGD":
        assert isinstance(found, str)
        assert re.fullmatch(rf"{method} [^.]+, which holds for plain SGD alone: leave optimizer=.+ out\.", found)
        return
    assert isinstance(found, FederatedModule), found
    assert found.completed_rounds == 2
    scores = found.evaluator.scores["test"]
    assert scores.shape == (3,)
    assert scores.isfinite().all()
    before = PROBLEMS[task].net(method == "FedGN").state_dict()
    after = found.personal_state(0)
    named = before.keys() & after.keys()
    assert any(not torch.equal(before[name].double(), after[name].double()) for name in named), "nothing was trained"


def test_the_page_says_which_methods_need_plain_sgd() -> None:
    page = (Path(__file__).parents[1] / "docs" / "own-task.md").read_text()
    rows = re.findall(r"^\| \[?(\w+)\b[^|]*\| (.+) \|$", page, re.MULTILINE)
    said = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows if name in METHODS}
    columns = [*PROBLEMS, *OPTIMIZERS]
    for method in METHODS:
        refused = OPTIMIZERS.keys() - {"SGD"} if method in PLAIN else ()
        assert said[method] == ["no" if column in refused else "yes" for column in columns], method


@pytest.mark.parametrize("task", ["MultiLabel", "Regression", "Segmentation", "NextToken"])
def test_settings_that_need_classes_refuse_tasks_without(task: str) -> None:
    sentence = (
        rf"^FedCluster forms groups='dominant' by the classes of clients, and {task} has no classes: choose .*\.$"
    )
    found = attempt("FedCluster", task, "SGD", groups="dominant")
    assert isinstance(found, str)
    assert re.match(sentence, found)
    found = attempt("FedBPS", task, "SGD", laplace={"curvature": "ggn"})
    assert isinstance(found, str)
    assert re.match(rf"^FedBPS draws classes for curvature='ggn', and {task} has no classes: choose .*\.$", found)


def test_settings_that_need_classes_take_classes() -> None:
    assert isinstance(attempt("FedCluster", "Classification", "Adam", groups="dominant"), FedCluster)
    assert isinstance(attempt("FedBPS", "Classification", "Adam", laplace={"curvature": "ggn"}), FedBPS)


def test_optimizer_state_cannot_be_kept_if_units_are_permuted() -> None:
    with pytest.raises(FederationError, match=r"FedMA permutes hidden units, .* leave keep_optimizer out"):
        FedMA(mlp(), optimizer="Adam", keep_optimizer=True)
