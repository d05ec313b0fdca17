"""Ranges that constructors declare: every edge of every option, in the check, in ``--help`` and on the pages."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch

from fl_lightning import callbacks, datamodules, local_optim, methods, nets, robust, schedules, tasks
from fl_lightning.arguments import NamedArguments, Settings, _types, fixed_options, limits, options
from fl_lightning.cli import main
from fl_lightning.datamodules import Elsewhere, Unimodal, partitions
from fl_lightning.engine import LocalTraining
from fl_lightning.errors import FederationError
from fl_lightning.federate import federate
from fl_lightning.methods import QFFL, SCAFFOLD, FedAvg, FedBPS, FedDAF, FedProx, WAFFLe, WAFFLeL1
from fl_lightning.methods import settings as method_settings
from fl_lightning.methods.settings import Inference, Laplace, Posterior, Trials
from fl_lightning.nets import FedNet
from fl_lightning.ranges import (
    Above,
    AtLeast,
    AtMost,
    Between,
    Count,
    CountOrZero,
    NonNegative,
    Part,
    Positive,
    PositiveShare,
    Range,
    Share,
    ShareBelowOne,
    allowed,
    bounds,
    ranges,
)
from tests.support import blobs, fit, mlp, trainer
from tests.support.problems import User


def sentence(call: Callable[[], Any]) -> str:
    """The sentence that a call is refused with, empty if it is not."""
    try:
        call()
    except FederationError as error:
        return str(error)
    return ""


class Mine(FedAvg):
    """A method of a user's, with options of every form."""

    def __init__(
        self,
        net: Any,
        share: Share | Literal["auto"] = "auto",
        widths: list[Count] | None = None,
        by_layer: dict[str, Positive] | None = None,
        pair: tuple[ShareBelowOne, Part] = (0.0, 0.5),
        deep: list[list[CountOrZero]] | None = None,
        both: Annotated[Count, AtMost(5)] = 1,
        plain: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, engine="stacked", **kwargs)


@pytest.mark.parametrize(
    ("one", "words", "inside", "out"),
    [
        (AtLeast(0), "0 or more", (0, 0.5, 1e300), (-1e-9, math.nan, math.inf, -math.inf)),
        (Above(0), "greater than 0", (5e-324, 1), (0, -0.0, math.inf)),
        (AtMost(5), "at most 5", (-1e300, 5), (5.1, -math.inf)),
        (Between(0, 1), "between 0 and 1", (0, 1), (-1e-9, 1 + 1e-9, math.nan)),
        (Range(0, 1, below=True), "at least 0 and below 1", (0, 1 - 1e-9), (1,)),
        (Range(0, 1, above=True), "greater than 0 and at most 1", (1, 1e-9), (0,)),
        (Range(0, 1, above=True, below=True), "greater than 0 and below 1", (0.5,), (0, 1)),
        (AtMost(1_000_000), "at most 1,000,000", (1_000_000,), (1_000_001,)),
    ],
    ids=str,
)
def test_a_range(one: Range, words: str, inside: tuple[float, ...], out: tuple[float, ...]) -> None:
    assert one.words == words
    assert all(value in one for value in inside)
    assert not any(value in one for value in out)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"share": 1.5}, "share must lie between 0 and 1, or be auto, not 1.5."),
        ({"share": "best"}, "share must be a number or auto, not 'best'."),
        ({"share": math.nan}, "share must be a number or auto, not nan."),
        ({"widths": [1, 0]}, "widths[1] must be 1 or more, not 0."),
        ({"widths": (0,)}, "widths[0] must be 1 or more, not 0."),
        ({"widths": [0.5]}, "widths must be a list or None, not [0.5]."),
        ({"by_layer": {"a": 1, "b": 0}}, "by_layer['b'] must be greater than 0, not 0."),
        ({"pair": (1.0, 0.5)}, "pair[0] must be at least 0 and below 1, not 1.0."),
        ({"pair": [0.0, 1.0]}, "pair[1] must be greater than 0 and below 1, not 1.0."),
        ({"deep": [[0, 1], [2, -1]]}, "deep[1][1] must be 0 or more, not -1."),
        ({"both": 6}, "both must be at most 5, not 6."),
        ({"both": 0}, "both must be 1 or more, not 0."),
        ({"lr": math.inf}, "lr must be 0 or more and finite, not inf."),
        ({"lr": -0.1}, "lr must be 0 or more, not -0.1."),
        ({"epochs": 10**7}, "epochs must be at most 1,000,000, not 10000000."),
    ],
)
def test_what_a_method_of_ones_own_declares_is_checked(given: dict[str, Any], says: str) -> None:
    assert sentence(lambda: Mine(mlp(), **given)) == says


def test_what_lies_in_the_range_and_what_has_none_is_taken() -> None:
    Mine(mlp(), share=0, widths=[1], by_layer={"a": 1e-9}, pair=[0, 0.1], deep=[[0], []], both=5, plain=-math.inf)  # type: ignore[arg-type]
    Mine(mlp(), share="auto", widths=None, by_layer=None)
    assert sentence(lambda: Mine(mlp(), 2.0)).startswith("share must lie"), "also by place"


def test_ranges_in_words() -> None:
    found = {name: allowed(hint) for name, hint in options(Mine).items()}
    assert found["share"] == "between 0 and 1, or auto"
    assert found["widths"] == "each 1 or more"
    assert found["by_layer"] == "each greater than 0"
    assert found["pair"] == "each at least 0 and below 1 or greater than 0 and below 1"
    assert found["both"] == "1 or more, at most 5"
    assert found["weighting"] == "samples, uniform"
    assert found["plain"] == found["engine"] == ""
    assert bounds(options(Mine)["weighting"]) == ""


def test_plain_annotations_of_a_user_work_as_ever() -> None:
    class Plain(FedAvg):
        def __init__(self, net, strength: float = 0.1, note=None, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN204
            super().__init__(net, **kwargs)

    class Unknown(FedAvg):
        def __init__(self, net: Any, what: NoSuchName = 3, **kwargs: Any) -> None:  # type: ignore[name-defined]  # noqa: F821
            super().__init__(net, **kwargs)

    assert Plain(mlp(), strength=-3.0, note=object()).local.lr == 0.01
    Unknown(mlp(), what="anything")
    assert limits(Plain).keys() == limits(FedAvg).keys()


def test_a_users_module_is_checked_by_the_method_that_trains_it() -> None:
    assert sentence(lambda: federate(User(), FedProx, mu=-1.0)) == "mu must be 0 or more, not -1.0."


# ---- every constructor ---------------------------------------------------------------------------------------------


PARTS: tuple[Any, ...] = (
    *(partitions, datamodules, callbacks, robust, schedules, local_optim, tasks, methods, nets),
    *(method_settings,),
)
CLASSES = sorted(
    {
        kind
        for part in PARTS
        for kind in vars(part).values()
        if isinstance(kind, type) and issubclass(kind, NamedArguments | FedNet) and not inspect.isabstract(kind)
    }
    | {LocalTraining},
    key=lambda kind: kind.__name__,
)
X = torch.zeros(8, 3)


def edges(hint: Any, wrap: Callable[[Any], Any] = lambda value: value) -> Iterator[tuple[Range, Any, Any]]:
    """Every range in a type, with a value just outside it and one at its edge, for both of its ends."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from edges(inner[0], wrap)
        whole = inner[0] is int
        for one in ranges(hint):
            for end, open_, out in ((one.least, one.above, -math.inf), (one.most, one.below, math.inf)):
                if math.isfinite(end):
                    beyond = end + math.copysign(1, out) if whole else math.nextafter(end, out)
                    within = end - math.copysign(1, out) if whole else math.nextafter(end, -out)
                    pair = (end, within) if open_ else (beyond, end)
                    yield one, *(wrap(int(value) if whole else float(value)) for value in pair)
    elif origin in (Union, types.UnionType):
        for one in inner:
            yield from edges(one, wrap)
    elif origin is dict:
        yield from edges(inner[1], lambda value: wrap({"fc1": value}))
    elif origin is tuple and ... not in inner:
        yield from edges(inner[0], lambda value: wrap((value, 0.5)))
    elif inner and origin is not Literal and isinstance(origin, type):
        yield from edges(inner[0], lambda value: wrap([value]))


def arguments_of(kind: type) -> dict[str, Any]:
    """Arguments for those that have no default."""
    found = inspect.signature(kind).parameters
    needed = {n: 5 for n, p in found.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    special = {"net": mlp(), "partition": Unimodal(clients=10), "inputs": X, "targets": X[:, 0].long(), "train": [[0]]}
    special |= {"members": (X, X), "nonmembers": (X, X), "data": blobs(), "clients": None, "input_shape": [3]}
    special |= {
        "client": "who",
        "target": "y",
        "path": "no.csv",
        "table": {"who": [0] * 9, "x": [1.0] * 9, "y": [0] * 9},
    }
    return {name: special.get(name, value) for name, value in needed.items()}


@pytest.mark.parametrize("kind", CLASSES, ids=[kind.__name__ for kind in CLASSES])
def test_every_declared_range_is_enforced_at_its_edge(kind: type) -> None:
    """Just outside is refused with the range in the sentence; at the edge that is never the reason."""
    own = {name: one.annotation for name, one in _types(kind.__init__).items()}  # type: ignore[misc]
    for name, hint in own.items():
        for one, outside, inside in edges(hint):
            given = arguments_of(kind)
            said = sentence(lambda given=given, name=name, value=outside: kind(**{**given, name: value}))  # type: ignore[misc]
            assert said.startswith(name), (name, outside, said)
            assert one.words in said
            said = sentence(lambda given=given, name=name, value=inside: kind(**{**given, name: value}))  # type: ignore[misc]
            assert not re.match(rf"{name}\S* must (be|lie) {one.words}", said), (name, inside, said)


def test_there_are_many() -> None:
    assert sum(bool(limits(kind)) for kind in CLASSES) > 80
    assert sum(len(limits(kind)) for kind in CLASSES if not issubclass(kind, FedAvg)) > 300


# ---- options that a class has no choice in, and settings -----------------------------------------------------------


@pytest.mark.parametrize("kind", [SCAFFOLD, QFFL, methods.FeSEM, methods.WeightErosion, methods.WAFFLEAvg])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_an_option_without_a_choice_is_refused_with_the_reason(kind: Any, weighting: str) -> None:
    said = sentence(lambda: kind(mlp(), weighting=weighting))
    assert said == f"{kind.__name__} has no option 'weighting', as {fixed_options(kind)['weighting']}: leave it out."
    method = kind(mlp())
    assert method.weighting == "uniform"
    assert "weighting" not in method.hparams


def test_options_that_moved_into_settings_are_shown() -> None:
    assert sentence(lambda: FedBPS(mlp(), chunk_size=3)).endswith("did you mean laplace.chunk_size?")
    assert sentence(lambda: FedBPS(mlp(), auto_values=[0.5])).endswith("did you mean trials.values?")
    assert sentence(lambda: FedDAF(mlp(), fit_steps=3)).endswith("did you mean inference.steps?")
    assert sentence(lambda: WAFFLe(mlp(), kl_weihgt=3)).endswith("did you mean posterior.kl_weight?")
    assert sentence(lambda: FedBPS(mlp(), laplace=3)) == (  # type: ignore[arg-type]
        "laplace must be Laplace(curvature=..., samples=..., draws=..., chunk_size=...), or a dict of these options, "
        "not 3."
    )
    assert sentence(lambda: FedBPS(mlp(), laplace={"sampls": 3})) == (  # type: ignore[arg-type]
        "Laplace has no option 'sampls'; did you mean samples?"
    )


@pytest.mark.parametrize("one", [Laplace("ggn", draws=3), Trials((0.1,)), Inference(cap=None), Posterior(0.5)])
def test_settings_are_values(one: Settings) -> None:
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == copy.copy(one) == one
    assert hash(one) == hash(copy.copy(one))


@dataclass(frozen=True)
class Dial(Settings):
    """Settings of a user's.

    Args:
        strength: how much.
    """

    strength: NonNegative = 1.0


class Dialled(FedAvg):
    def __init__(self, net: Any, dial: Dial = Dial(), **kwargs: Any) -> None:  # noqa: B008
        super().__init__(net, **kwargs)
        self.dial = Dial.of(dial, "dial")


def test_settings_of_ones_own() -> None:
    assert Dialled(mlp(), dial={"strength": 2.0}).dial == Dial(2.0)  # type: ignore[arg-type]
    assert sentence(lambda: Dial(-1.0)) == "strength must be 0 or more, not -1.0."
    assert limits(Dialled)["dial.strength"] == "0 or more"


def test_checkpoints_keep_settings_as_plain_values(tmp_path: Any) -> None:
    method = FedBPS(
        mlp(), p=0.5, laplace=Laplace("hessian", draws=2), trials=Trials((0.1, 0.5)), lr=0.1, engine="stacked"
    )
    run = trainer(1)
    run.fit(method, datamodule=blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    noted = torch.load(tmp_path / "it.ckpt", weights_only=True)["hyper_parameters"]
    assert noted["laplace"] == {"curvature": "hessian", "samples": 1024, "draws": 2, "chunk_size": 128}
    again = FedBPS.load_from_checkpoint(tmp_path / "it.ckpt")
    assert (again.laplace, again.trials) == (method.laplace, method.trials)
    assert again.hparams["trials"] == method.hparams["trials"] == {"values": [0.1, 0.5], "rounds": 10, "share": 0.1}


def test_scaffold_loads_from_its_checkpoint(tmp_path: Any) -> None:
    method, data = SCAFFOLD(mlp(), lr=0.1, engine="stacked"), blobs()
    fit(method, data, rounds=1)
    method.trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert SCAFFOLD.load_from_checkpoint(tmp_path / "it.ckpt").weighting == "uniform"


def test_data_elsewhere_checks_its_shape() -> None:
    assert sentence(lambda: Elsewhere([3, 0])) == "input_shape[1] must be 1 or more, not 0."


# ---- the command line ----------------------------------------------------------------------------------------------


def test_help_has_the_ranges(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for name, says in (
        ("FedProx", "(type: float, 0 or more, default: 0.01)"),
        ("FedProx", "(type: int, 1 or more, at most 1,000,000, default: 1)"),
        ("FedBPS", "(type: Union[float, Literal['auto']], between 0 and 1, default: 0.7)"),
        ("FedBPS", "--model.laplace.draws"),
        ("WAFFLe", "bound of the absolute logits of pi. (type: float, greater than 0, default: 8.0)"),
    ):
        with pytest.raises(SystemExit):
            main(["fit", f"--model.help={name}"])
        assert says in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=Digits"])
    assert "(type: float, greater than 0 and at most 1, default: 1.0)" in capsys.readouterr().out


def test_help_of_scaffold_has_no_weighting(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("SCAFFOLD", "WAFFLEAvg", "WeightErosion", "QFFL", "FeSEM"):
        with pytest.raises(SystemExit):
            main(["fit", f"--model.help={kind}"])
        said = capsys.readouterr().out
        assert "--model.weighting" not in said
        assert "--model.batch_size" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["FedBPS", "--model.laplace.draws=0"], "draws must be 1 or more, not 0."),
        (["FedBPS", "--model.laplace_samples=3"], "did you mean laplace.samples?"),
        (["SCAFFOLD", "--model.weighting=uniform"], "SCAFFOLD all clients have the same weight"),
        (["WAFFLe", "--model.evaluation.selection=mean"], "selection: expected one of expected, threshold, sampled"),
    ],
)
def test_the_command_line_refuses_in_a_sentence(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--data=Digits", "--model.net=MLP", "--model", *argv])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_l1_takes_its_own_settings() -> None:
    assert WAFFLeL1(mlp(), evaluation={"adapt_epochs": 3}).evaluated.adapt_epochs == 3  # type: ignore[arg-type]
    assert "selection" in sentence(lambda: WAFFLeL1(mlp(), evaluation={"selection": "sampled"}))  # type: ignore[arg-type]


def test_positive_shares() -> None:
    assert allowed(PositiveShare) == "greater than 0 and at most 1"
