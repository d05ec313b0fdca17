"""Common mistakes, one row each: every one gives an error that names it."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping

from fl_lightning import callbacks, local_optim, methods, nets, robust, schedules, tasks
from fl_lightning.arguments import NamedArguments, _types, fits
from fl_lightning.callbacks import LedgerCallback, PredictionWriter
from fl_lightning.callbacks.record import read_record
from fl_lightning.cli import main
from fl_lightning.cli.names import resolve
from fl_lightning.datamodules import ByUser, ConceptShift, Digits, MajorMinor, TensorFederation, Unimodal, partitions
from fl_lightning.engine.contract import LocalTraining
from fl_lightning.errors import FederationError
from fl_lightning.federation import ClientIndex
from fl_lightning.lightning_checks import check_data, check_net, check_net_argument, check_trainer
from fl_lightning.methods import APFL, IFCA, FedAvg, FedProx, WAFFLe
from fl_lightning.methods.settings import Trials
from fl_lightning.nets import MLP, FedNet
from fl_lightning.ranges import plain
from tests.support import blobs, fit, mlp, trainer

X, Y = torch.randn(8, 3), torch.arange(8) % 2
LISTS = {"train": [[0, 1, 2], [3, 4]], "test": [[5], [6]]}


class Loose(FedAvg):
    """A method whose default is not of the type that it says."""

    def __init__(self, net: Any, anything: int = None, **kwargs: Any) -> None:  # type: ignore[assignment]  # noqa: RUF013
        super().__init__(net, **kwargs)


class Plain(LightningModule):
    """A module that is not federated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Never called."""

    def configure_optimizers(self) -> None:
        """Nothing to step."""


def made(inputs: Any = X, targets: Any = Y, **kwargs: Any) -> Any:
    """Own tensors, built."""
    return TensorFederation(inputs, targets, **{**LISTS, **kwargs}).federation


def with_nan() -> torch.Tensor:
    x = X.clone()
    x[5, 1] = math.nan
    return x


def changed(transform: Any) -> TensorFederation:
    """The data of the tests with a change of training batches."""
    data = blobs()
    return TensorFederation(
        data.inputs, data.targets, data._train, data._test, transform=transform, augment=True, val_fraction=0.0
    )


class Optimized(FedAvg):
    """Any number of optimizers for the server."""

    def __init__(self, net: Any, number: int | None = None) -> None:
        super().__init__(net, engine="stacked")
        self.number = number

    def configure_optimizers(self) -> Any:
        if self.number is None:
            return None
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.server, mlp())][: self.number]


def checked(monitor: str | None = None, **options: Any) -> None:
    """The checks of a Trainer with these options."""
    options = {"callbacks": [EarlyStopping(monitor)], **options} if monitor else options
    run = trainer(**options)
    data = blobs()
    run.datamodule = data  # type: ignore[attr-defined]
    check_trainer(run)
    check_data(run)


PYTHON: list[tuple[str, Callable[[], Any], str]] = [
    ("lr is text", lambda: FedAvg(mlp(), lr="0.1"), "lr must be a number, not '0.1'"),  # type: ignore[arg-type]
    ("lr is infinite", lambda: LocalTraining(lr=math.inf), "lr must be 0 or more and finite"),
    ("momentum is text", lambda: LocalTraining(momentum="a"), "momentum must be a number"),  # type: ignore[arg-type]
    ("clip_norm is text", lambda: LocalTraining(clip_norm="a"), "clip_norm must be a number"),  # type: ignore[arg-type]
    ("epochs in halves", lambda: LocalTraining(epochs=1.5), "epochs must be a whole number, not 1.5"),  # type: ignore[arg-type]
    ("no epochs", lambda: LocalTraining(epochs=0), "epochs must be 1 or more, not 0"),
    ("epochs is a bool", lambda: LocalTraining(epochs=True), "epochs must be a whole number"),
    ("endless epochs", lambda: LocalTraining(epochs=10**12), "epochs must be at most 1,000,000"),
    ("endless batches", lambda: LocalTraining(batch_size=10**12), "batch_size must be at most 1,000,000"),
    ("net is a class", lambda: check_net_argument("FedAvg", (MLP,), {}), r"not its class: FedAvg\(MLP\(\.\.\.\)\)"),
    ("net is text", lambda: check_net_argument("FedAvg", (), {"net": "MLP"}), "FedAvg needs a network, a torch.nn"),
    ("no net", lambda: check_net_argument("FedAvg", (), {"lr": 1}), r"FedAvg needs a network: FedAvg\(MLP"),
    ("partition is text", lambda: Digits(partition="Unimodal"), r"such as Unimodal\(clients=10"),  # type: ignore[arg-type]
    ("partition is a class", lambda: Digits(partition=Unimodal), r"such as Unimodal\(clients=10"),  # type: ignore[arg-type]
    ("partition is a number", lambda: Digits(partition=3), "partition must be a scheme"),  # type: ignore[arg-type]
    (
        "unknown option of data",
        lambda: Digits(fractoin=0.1),
        r"Digits has no option 'fractoin'; did you mean fraction\?",
    ),
    ("fraction is text", lambda: Digits(fraction="0.1"), "fraction must be a number"),  # type: ignore[arg-type]
    ("val_fraction is text", lambda: Digits(val_fraction="0.1"), "val_fraction must be a number"),  # type: ignore[arg-type]
    ("eval_clients in halves", lambda: Digits(eval_clients=1.5), "eval_clients must be a whole"),  # type: ignore[arg-type]
    ("limit in halves", lambda: Digits(limit=1.5), "limit must be a whole number"),  # type: ignore[arg-type]
    (
        "labels from 1",
        lambda: check_net(FedAvg(MLP(3, (), 2)), made(targets=Y + 1)),
        "Labels run from 1 to 2, but classes are counted from 0: subtract 1",
    ),
    ("labels of text", lambda: made(targets=np.array(["a", "b"] * 4)), "targets must be a tensor or an array"),
    ("inputs of objects", lambda: made(inputs=[object()] * 8), "inputs must be a tensor or an array"),
    ("too few labels", lambda: made(targets=Y[:7]), "8 inputs and 7 targets"),
    ("NaN in inputs", lambda: made(inputs=with_nan()), r"1 of the 8 inputs .* sample 5\) hold NaN"),
    ("shared rows", lambda: made(train=[[0, 1, 2], [2, 3]]), r"1 samples \(the first is 2\) are in the training"),
    ("rows given twice", lambda: made(train=[[0, 1, 1], [2, 3]]), "more than once"),
    ("index 0.7", lambda: made(train=[[0, 0.7], [1]]), "Client 0's indices must be a list of integers"),
    ("index is a mask", lambda: ClientIndex.of([np.array([True, False])]), "must be a list of integers, .* bool"),
    ("index is a table", lambda: ClientIndex.of([[[1], [2]]]), r"an array of shape \(2, 1\)"),  # type: ignore[list-item]
    ("mean of another shape", lambda: made(mean=torch.zeros(4), std=torch.ones(4)), r"mean of shape \(4,\)"),
    ("mean adds a dimension", lambda: made(mean=torch.zeros(1, 1, 3), std=torch.ones(3)), r"mean of shape \(1, 1, 3\)"),
    ("std of zero", lambda: made(mean=torch.zeros(3), std=torch.zeros(3)), "std must be greater than 0"),
    ("half precision", lambda: checked(precision="16-true"), "needs a gradient scaler"),
    ("some training batches", lambda: checked(limit_train_batches=10), "limit_train_batches"),
    ("half the validation", lambda: checked(limit_val_batches=0.5), r"limit_val_batches=0\.5"),
    ("half the test", lambda: checked(limit_test_batches=0.5), r"limit_test_batches=0\.5"),
    (
        "monitors what is not there",
        lambda: checked("val/acc"),
        "EarlyStopping monitors 'val/acc', but the data holds no",
    ),
    (
        "forgot federate",
        lambda: trainer().fit(Plain(), Digits()),
        r"train federate\(Plain\(\.\.\.\)\), or Plain on Pooled",
    ),
    ("alpha is text", lambda: APFL(mlp(), alpha="x"), "alpha must be a number, not 'x'"),  # type: ignore[arg-type]
    ("half a cluster", lambda: IFCA(mlp(), clusters=0.5), r"clusters must be a whole number, not 0\.5"),  # type: ignore[arg-type]
    ("factors are a number", lambda: WAFFLe(mlp(), factors=3), "factors must be a dict or None, not 3"),  # type: ignore[arg-type]
    ("a list of texts", lambda: Trials(values=["a"]), r"values must be a list, not \['a'\]"),  # type: ignore[arg-type]
    ("by place", lambda: FedAvg(mlp(), 0.1, 1.5), "epochs must be a whole number"),  # type: ignore[arg-type]
    ("lr is no number", lambda: FedAvg(mlp(), lr=math.nan), "lr must be a number, not nan"),
    ("yes is not true", lambda: FedAvg(mlp(), keep_optimizer="yes"), "keep_optimizer must be True or False, not 'yes'"),  # type: ignore[arg-type]
    ("store is a number", lambda: FedAvg(mlp(), store=3), "store must be a text or None, not 3"),  # type: ignore[arg-type]
    ("another weighting", lambda: FedAvg(mlp(), weighting="size"), "weighting must be samples or uniform, not 'size'"),  # type: ignore[arg-type]
    ("rule by name", lambda: FedAvg(mlp(), aggregation="median"), r"aggregation must be a rule .* such as Median\(\)"),  # type: ignore[arg-type]
    (
        "server's optimizer by name",
        lambda: FedAvg(mlp(), server_optimizer="Adam"),
        "server_optimizer must be a function",
    ),  # type: ignore[arg-type]
    ("a million workers", lambda: FedAvg(mlp(), workers=10**6), "workers must be at most 256, not 1000000"),
    ("a long value", lambda: Digits(seed=list(range(99))), "seed must be a whole number or None, not a list"),  # type: ignore[arg-type]
    ("net of text", lambda: MLP(in_features="a"), "in_features must be a whole number, not 'a'"),  # type: ignore[arg-type]
    ("net below 0", lambda: MLP(num_classes=-1), "num_classes must be 1 or more, not -1"),
    ("eval_only is a number", lambda: blobs(eval_only=1), "eval_only must be a list or None, not 1"),
    ("too many clients", lambda: MajorMinor(10**9)(Y, 0), "1,000,000,000 clients cannot share 8 samples"),
    ("scheme within by name", lambda: ConceptShift("IID"), "partition must be a scheme with its settings"),  # type: ignore[arg-type]
    (
        "users of two kinds",
        lambda: TensorFederation(X, Y, partition=ByUser(2, 2), users=["a", None] * 4).federation,
        "users must be all names or all numbers",
    ),
    ("sparse inputs", lambda: made(inputs=X.to_sparse()), "inputs must be a dense tensor of real numbers"),
    ("complex inputs", lambda: made(inputs=X.cfloat()), "inputs must be a dense tensor of real numbers"),
    (
        "labels in a column",
        lambda: fit(FedAvg(MLP(in_features=3, num_classes=2)), TensorFederation(X, Y[:, None], **LISTS)),
        "Classification needs one integer per sample",
    ),
    ("a client without samples", lambda: made(train=[[0, 1, 2, 3], []]), "1 of 2 clients have no train samples"),
    (
        "transform of one argument",
        lambda: fit(FedAvg(mlp()), changed(lambda x: x)),
        "transform is called with a batch and a NumPy Generator, and failed",
    ),
    (
        "transform drops samples",
        lambda: fit(FedAvg(mlp()), changed(lambda x, rng: x[:1])),
        r"transform must return a batch of the shape it was given, \(2, 20\), not \(1, 20\)",
    ),
    ("tunes batches", lambda: checked(callbacks=[BatchSizeFinder()]), "would tune the server's single step"),
    ("server without optimizer", lambda: fit(Optimized(mlp()), blobs()), "needs one optimizer.* returns none"),
    ("server with two", lambda: fit(Optimized(mlp(), 2), blobs()), "needs one optimizer.* returns 2"),
    ("predictions as pickle", lambda: PredictionWriter("a.pkl"), r"ends in \.csv, \.parquet, \.npz, not a\.pkl"),
]


@pytest.mark.parametrize(("call", "sentence"), [row[1:] for row in PYTHON], ids=[row[0] for row in PYTHON])
def test_wrong_arguments_in_python(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(FederationError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


ACCEPTED: list[tuple[str, Callable[[], Any]]] = [
    ("numbers of NumPy", lambda: FedAvg(mlp(), lr=np.float32(0.1), epochs=np.int64(2), keep_optimizer=np.bool_(True))),  # type: ignore[arg-type]
    ("a whole number where any will do", lambda: FedProx(mlp(), mu=1)),
    ("a list for a tuple", lambda: Trials(values=[0.1, 0.5])),  # type: ignore[arg-type]
    ("a path for a text", lambda: LedgerCallback(folder=Path("runs"))),  # type: ignore[arg-type]
    ("a default of another type", lambda: Loose(mlp(), anything=None)),
    ("labels that are true or false", lambda: made(targets=Y.bool())),
    ("labels of eight bits", lambda: made(targets=Y.to(torch.uint8))),
    ("inputs in double precision", lambda: made(inputs=X.double())),
    ("lists of lists", lambda: made(inputs=X.tolist(), targets=Y.tolist())),
    ("inputs that require a gradient", lambda: made(inputs=X.clone().requires_grad_())),
    ("lists from a generator", lambda: made(train=(part for part in LISTS["train"]))),
    ("a class that is missing", lambda: made(targets=Y * 2)),
]


@pytest.mark.parametrize("call", [row[1] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_correct_arguments_are_accepted(call: Callable[[], Any]) -> None:
    call()


def test_inputs_do_not_require_gradients() -> None:
    assert not made(inputs=X.clone().requires_grad_()).inputs.requires_grad


#: Values of which every option refuses most, and those that a plain type cannot be.
WRONG: tuple[Any, ...] = ("xx", -1, 0.5, None, [], math.nan)
NEVER: dict[Any, tuple[Any, ...]] = {
    bool: ("xx", -1, 0.5, None, [], math.nan),
    int: ("xx", 0.5, None, [], math.nan),
    float: ("xx", None, [], math.nan),
    str: (-1, 0.5, None, []),
}
PARTS: tuple[Any, ...] = (partitions, callbacks, robust, schedules, local_optim, tasks, methods, nets)
CLASSES = sorted(
    {
        kind
        for part in PARTS
        for kind in vars(part).values()
        if isinstance(kind, type) and issubclass(kind, NamedArguments | FedNet) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)


def sentence(call: Callable[[], Any]) -> str:
    """The sentence that a call is refused with, empty if it is not."""
    try:
        call()
    except FederationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", CLASSES, ids=[kind.__name__ for kind in CLASSES])
def test_every_option_takes_its_type_or_says_so(kind: type) -> None:
    """No option of any class ends in anything but an object or a sentence that names the option."""
    options = {n: p for n, p in inspect.signature(kind).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    types = {n: plain(p.annotation) for n, p in _types(kind.__init__).items()}  # type: ignore[misc]
    needed: dict[str, Any] = {n: 5 for n, p in options.items() if p.default is p.empty}
    needed |= {n: (X, Y) for n in needed if n in types and not fits(5, types[n])}
    needed |= {n: value for n, value in {"net": mlp(), "partition": Unimodal(clients=10)}.items() if n in needed}
    for name in options.keys() - {"net"}:
        for value in WRONG:
            refused = value is not options[name].default and any(value is one for one in NEVER.get(types.get(name), ()))
            said = sentence(lambda name=name, value=value: kind(**{**needed, name: value}))
            assert "\n" not in said
            assert not refused or said.startswith(f"{name} must be "), (name, value, said)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES: list[tuple[str, str, str, list[str], str]] = [
    ("bomb", "c.yaml", BOMB, ["--config", "c.yaml"], "c.yaml expands to too many entries"),
    ("holds itself", "c.yaml", "a: &a [*a]\n", ["--config", "c.yaml"], "c.yaml expands to too many entries"),
    (
        "lr one level too high",
        "c.yaml",
        "model:\n  class_path: FedAvg\n  lr: 0.1\n",
        ["--config=c.yaml"],
        "c.yaml has model.lr, an option of FedAvg: move it under model.init_args",
    ),
    (
        "callback's option too high",
        "c.yaml",
        "trainer:\n  callbacks:\n    - class_path: EarlyStopping\n      monitor: val/acc\n",
        ["--config=c.yaml"],
        r"trainer.callbacks\[0\].monitor, an option of EarlyStopping",
    ),
    (
        "no such configuration",
        "c.yaml",
        "",
        ["--config", "nosuch"],
        "no file nosuch; the library's own configurations are: quickst",
    ),
    ("error", "e.py", "\n1 / 0\n", ["--use", "e.py"], "e.py cannot be used: ZeroDivisionError in line 2: division"),
    ("no file to use", "e.py", "", ["--use", "nofile.py"], "^There is no file nofile.py: --use takes a Python file or"),
    ("syntax error", "s.py", "\n\ndef\n", ["--use", "s.py"], "s.py cannot be used: SyntaxError in line 3"),
]


@pytest.mark.parametrize(("file", "text", "arguments", "sentence"), [r[1:] for r in FILES], ids=[r[0] for r in FILES])
def test_wrong_files(
    file: str, text: str, arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    with pytest.raises(FederationError, match=sentence):
        resolve(["fit", *arguments])


@pytest.mark.parametrize("key", ["settings", "curves", "clients", "bytes", "rounds", "engine"])
def test_a_record_with_missing_keys_is_refused(key: str, tmp_path: Path) -> None:
    whole: dict[str, Any] = dict.fromkeys(("rounds", "seconds", "steps", "parameters"), 1)
    whole |= {"format": 1, "settings": {}, "curves": {}, "groups": {}, "engine": None, "bytes": None}
    whole["clients"] = {"rounds": [], "accuracy": []}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(whole))
    assert read_record(path) == whole
    path.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
    with pytest.raises(FederationError, match=f"run.json has no {key}"):
        read_record(path)
    path.write_text(json.dumps({**whole, "clients": {"rounds": []}}))
    with pytest.raises(FederationError, match=r"has no clients\.accuracy"):
        read_record(path)


COMMANDS: list[tuple[str, list[str], str]] = [
    ("no net", ["--data", "Digits", "--model", "FedAvg"], "a method needs a network: add --model.net, one of BiLSTM, "),
    ("no data and method", [], "add --data and --model, or --config quickstart for a first run."),
    ("no method", ["--data", "Digits"], "add --model, or --config quickstart"),
    (
        "a schedule",
        ["--config", "quickstart", "--model.lr_schedule=Cosin"],
        "lr_schedule is no schedule: 'Cosin'; use one",
    ),
    ("half precision", ["--config", "quickstart", "--trainer.precision=16"], "precision=16 needs a gradient scaler"),
    ("devices", ["--config", "quickstart", "--trainer.devices=9999"], "--trainer.devices=9999 starts that many"),
]


@pytest.mark.parametrize(("argv", "sentence"), [row[1:] for row in COMMANDS], ids=[row[0] for row in COMMANDS])
def test_wrong_arguments_on_the_command_line(
    argv: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["fit", *argv])
    assert end.value.code == 2
    assert re.search(re.escape(sentence), capsys.readouterr().err)


def test_arrays_are_accepted_wherever_tensors_are() -> None:
    """Arrays as they come: from files that are mapped, reversed, in double precision, with labels of any type."""
    x = np.arange(24.0).reshape(8, 3)
    x.flags.writeable = False
    y = np.array([0, 1] * 4, dtype=np.uint8)[::-1]
    lists = {"train": [np.arange(3), np.array([3, 4])], "test": [[5], [6]], "global_test": np.array([7])}
    scale = {"mean": np.ones(3), "std": np.full(3, 2.0)}
    ours = TensorFederation(x, y, **lists, **scale, label_maps=np.array([[0, 1], [1, 0]])).federation  # type: ignore[arg-type]
    assert torch.equal(ours.inputs, torch.arange(24.0).double().view(8, 3))
    assert ours.targets.tolist() == [1, 0] * 4
    features, labels = ours.gather([0, 1], torch.tensor([[0], [3]]), torch.float32)
    assert features.squeeze().tolist() == [[-0.5, 0.0, 0.5], [4.0, 4.5, 5.0]]
    assert labels.tolist() == [[1], [1]]


def test_classes_name_themselves_and_not_their_bases() -> None:
    """A class that passes its arguments on, and one that does not."""
    with pytest.raises(
        FederationError, match=r"TensorFederation has no option 'val_frction'; did you mean val_fraction\?"
    ):
        made(val_frction=0.1)
    assert FedProx(mlp(), mu=0.1).mu == 0.1
