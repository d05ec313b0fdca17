"""``fl-lightning attack``: run a privacy attack on a checkpoint and report its threat model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.callbacks import (
    ClientMembershipCallback,
    DifferentialPrivacyCallback,
    GradientLeakageCallback,
    ImprintCallback,
    MembershipInferenceCallback,
    ModelInversionCallback,
    PropertyInferenceCallback,
)
from fl_lightning.callbacks.attacks import AttackCallback
from fl_lightning.cli.lightning import FederatedCLI, about, check_named, given, hide_dry_run
from fl_lightning.cli.parsing import FederatedArgumentParser
from fl_lightning.errors import FederationError
from fl_lightning.privacy.views import VIEWS
from fl_lightning.quiet import quiet_trainer, silence
from fl_lightning.view import View

ATTACKS: dict[str, type[AttackCallback]] = {
    kind.attack: kind
    for kind in (
        MembershipInferenceCallback,
        ModelInversionCallback,
        GradientLeakageCallback,
        ClientMembershipCallback,
        PropertyInferenceCallback,
        ImprintCallback,
    )
}


class AttackCLI(FederatedCLI):
    """Method and data as in ``fit``, and the attack."""

    def __init__(self, args: list[str] | None) -> None:
        names = {"prog": "fl-lightning attack", **about("attack")}
        super().__init__(args=args, run=False, save_config_callback=None, parser_kwargs=names)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of the attack."""
        super().add_arguments_to_parser(parser)
        hide_dry_run(parser)
        parser.add_argument("--ckpt_path", type=str | None, help="checkpoint of the attacked run")
        parser.add_argument("--weights_only", type=bool | None, help="how to load the checkpoint, as in fit")
        parser.add_argument("--attack", type=Literal[tuple(ATTACKS)], default=next(iter(ATTACKS)), help="which attack")
        parser.add_argument(
            "--view",
            type=str,
            nargs="+",
            help=f"the adversaries, from {', '.join(VIEWS)}; default: the usual ones of the attack",
        )
        parser.add_argument("--options", type=dict[str, Any], default={}, help="settings of the attack's callback")
        parser.add_argument("--out", type=str, default="runs/attack", help="folder for the report")


def main(argv: list[str]) -> None:
    """Run the command; ``argv`` begins with its name."""
    cli = AttackCLI(given(argv, argv[1:]))
    if cli.config["dry_run"]:
        raise FederationError("--dry_run is an option of fit, not of attack.")
    if cli.config["ckpt_path"] is None:
        raise FederationError("The attacked run is missing: add --ckpt_path runs/.../last.ckpt.")
    check_named(cli.config["ckpt_path"])
    options = dict(cli.config["options"] or {})
    if cli.config["view"]:
        options["views"] = cli.config["view"]
    attack = make_attack(cli.config["attack"], {"folder": cli.config["out"], **options})
    callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
    attack.watch = _progress(attack.attack, bool(cli.config["quiet"]))
    defences = [callback for callback in callbacks if isinstance(callback, DifferentialPrivacyCallback)]
    with silence(warned=False):
        trainer = quiet_trainer(
            accelerator=cli.trainer.accelerator,
            devices=1,
            precision=cli.trainer.precision,
            limit_test_batches=1,
            callbacks=[*defences, attack],
        )
        known = inspect.signature(trainer.test).parameters  # before 2.6 Lightning has no weights_only
        saved = {name: cli.config[name] for name in ("ckpt_path", "weights_only") if name in known}
        trainer.test(cli.model, datamodule=cli.datamodule, verbose=False, **saved)
    assert attack.report is not None
    print(attack.report.markdown())
    print(f"wrote {Path(cli.config['out']) / f'attack_{attack.attack}.json'}")


def _progress(name: str, quiet: bool) -> Callable[[int, int], None]:
    """Progress over an attack's targets; starts with the first, when their number is known."""
    shown: list[View] = []

    def watch(done: int, total: int) -> None:
        if not shown:
            shown.append(View("target", total, quiet=quiet))
        shown[0].update(done, f"{name} attack")
        if done == total:
            shown.pop().close()

    return watch


def make_attack(name: str, options: dict[str, Any]) -> AttackCallback:
    """Build the attack's callback; an error lists its options."""
    kind = ATTACKS[name]
    known = list(inspect.signature(kind).parameters)
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise FederationError(f"The {name} attack has no option {unknown[0]!r}; its options are {', '.join(known)}.")
    parser = FederatedArgumentParser()  # it knows the types
    parser.add_class_arguments(kind, skip={"views"})
    parser.parse_object({option: value for option, value in options.items() if option != "views"})
    return kind(**options)
