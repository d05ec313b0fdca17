"""Attacks on any classifier in a LightningModule, federated or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import seeding
from fl_lightning.callbacks.base import Several
from fl_lightning.errors import FederationError
from fl_lightning.metrics import membership_intervals, membership_summary, psnr
from fl_lightning.privacy import scores
from fl_lightning.privacy.figures import images_figure, roc_figure, show_figure
from fl_lightning.privacy.gradients import Matching, ToNet, in_range, labels_of_head, model_loss, rank_one
from fl_lightning.privacy.inference import answers_of
from fl_lightning.privacy.inversion import Inversion
from fl_lightning.privacy.properties import Property, answer_profile, draw_clients, infer_property
from fl_lightning.quiet import quiet_trainer, silence

#: Inputs and labels.
Samples = tuple[Tensor, Tensor]


class ClassifierAttackCallback(Several):
    """Attacks a classifier at the end of a fit or a test.

    Membership: ``loss``, and with shadows ``lira``, ``lira_online``, ``rmia`` and ``rmia_online``. Shadows are the
    adversary's own modules, each trained by a stock Trainer on a random half of the attacked samples, so that every
    sample is in half of them. Gradient leakage: reconstruction of one non-member from its gradient. Model inversion
    (optional): an image of every class, compared with the mean of its members; ``same`` is the share that another
    model, the first shadow, assigns to their class. Property inference (optional): whether the training data has a
    property, inferred from shadows trained on non-members with and without it; ``answer`` is 1 for yes, and
    ``shadow_auroc`` is the AUROC on shadows that were not used for training.

    Scores are stored in :attr:`scores`, logged under ``attack/...`` and written to ``attack_classifier.json``; ROC
    curves and the reconstruction are figures. The fit is not changed.

    Args:
        members: inputs and labels that the module was trained on, x of shape (n, ...), y of shape (n,).
        nonmembers: the same number of other samples of the same distribution.
        make: builds a new module like the attacked one before its fit, for shadows; None leaves shadows out.
        shadows: number of shadows; must be even.
        epochs: number of epochs of each shadow.
        batch_size: batch size of each shadow.
        low: the smallest value of an input, for leakage.
        high: the largest value of an input.
        matching: options of gradient matching; None leaves leakage out.
        inversion: options of model inversion; None leaves it out.
        holds: property of a module's training labels; None leaves property inference out. Needs ``make``.
        property_size: number of samples of each of the ``shadows`` with and the ``shadows`` without the property.
        seed: seed of the shadows' halves and batches.
        folder: output folder; None means the Trainer's log folder.
    """

    def __init__(
        self,
        members: Samples,
        nonmembers: Samples,
        make: Callable[[], LightningModule] | None = None,
        shadows: int = 8,
        epochs: int = 10,
        batch_size: int = 32,
        low: float = 0.0,
        high: float = 1.0,
        matching: Matching | None = Matching(),  # noqa: B008 - frozen
        inversion: Inversion | None = None,
        holds: Property | None = None,
        property_size: int = 100,
        seed: int = 0,
        folder: str | None = None,
    ) -> None:
        if holds is not None and make is None:
            raise FederationError("Property inference trains shadows: pass make, a function that makes a new module.")
        if property_size < 1:
            raise FederationError(f"property_size must be 1 or more, not {property_size}.")
        if shadows < 2 or shadows % 2:
            raise FederationError(f"shadows must be an even number of 2 or more, not {shadows}.")
        if not len(members[1]) or not len(nonmembers[1]):
            raise FederationError("An attack on a classifier needs members and non-members.")
        self.x = torch.cat((members[0], nonmembers[0]))
        self.y = torch.cat((members[1], nonmembers[1]))
        self.members = torch.arange(len(self.y)) < len(members[1])
        self.make, self.shadows, self.epochs, self.batch_size = make, shadows, epochs, batch_size
        self.low, self.high, self.matching, self.seed, self.folder = low, high, matching, seed, folder
        self.inversion, self.holds, self.property_size = inversion, holds, property_size
        #: Metrics by attack.
        self.scores: dict[str, dict[str, float]] = {}
        self._judge: LightningModule | None = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack."""
        self._strike(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack."""
        self._strike(trainer, pl_module)

    def _strike(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        training = module.training
        module.eval()
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng():
            found = self._membership(module)
            curves = {name: (value, self.members) for name, value in found.items()}
            show_figure(trainer, "attack/membership", partial(roc_figure, curves), trainer.global_step, self.folder)
            self.scores = {name: self._judged(value) for name, value in found.items()}
            if self.matching is not None:
                self.scores["leakage"] = self._leakage(trainer, module, self.matching)
            if self.inversion is not None:
                self.scores["inversion"] = self._inversion(trainer, module, self.inversion)
            if self.holds is not None:
                self.scores["property"] = self._property(module, self.holds)
        module.train(training)
        logged = {f"attack/{how}/{k}": v for how, values in self.scores.items() for k, v in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics({name: value for name, value in logged.items() if value == value}, trainer.global_step)
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "attack_classifier.json").write_text(json.dumps(self.scores, indent=1))

    def _judged(self, values: Tensor) -> dict[str, float]:
        summary = membership_summary(values, self.members)
        kept = ("auroc", "best_accuracy", "tpr_at_1", "tpr_at_01")
        return {name: float(summary[name]) for name in kept} | membership_intervals(values, self.members)

    def _membership(self, module: LightningModule) -> dict[str, Tensor]:
        """Return the scores of all samples, by attack."""
        target = self._asked(module)
        found = {"loss": scores.loss_scores(target.loss)}
        if self.make is None:
            return found
        rng = seeding.stream(self.seed, "attack.halves")
        inside = torch.zeros(self.shadows, len(self.y), dtype=torch.bool)
        for number in range(0, self.shadows, 2):
            inside[number, seeding.permutation(rng, len(self.y))[: len(self.y) // 2]] = True
            inside[number + 1] = ~inside[number]
        shadows = [self._shadow(number, torch.nonzero(own).flatten()) for number, own in enumerate(inside)]
        self._judge, known = shadows[0], [self._asked(one) for one in shadows]
        odds, chances = torch.stack([one.confidence for one in known]), torch.stack([-one.loss for one in known]).exp()
        found["lira"] = scores.lira_offline(target.confidence, odds, ~inside)
        found["lira_online"] = scores.lira_online(target.confidence, odds, inside, ~inside)
        chance = (-target.loss).exp()
        # Every shadow has seen half of the population too.
        found["rmia"] = scores.rmia(chance, chances, ~inside, chance, chances)
        found["rmia_online"] = scores.rmia(chance, chances, ~inside, chance, chances, inside)
        return found

    @torch.no_grad()
    def _asked(self, module: LightningModule) -> Any:
        return answers_of(self._logits(module), self.y)

    @torch.no_grad()
    def _logits(self, module: LightningModule) -> Tensor:
        return torch.cat([module(part.to(module.device)).double().cpu() for part in torch.split(self.x, 512)])

    def _shadow(self, number: int, inside: Tensor) -> LightningModule:
        """A module of the adversary's own, trained on these rows."""
        assert self.make is not None
        module = self.make()
        torch.manual_seed(int(seeding.stream(self.seed, "attack.shadow", client=number).integers(2**31)))
        rows = DataLoader(TensorDataset(self.x[inside], self.y[inside]), self.batch_size, shuffle=True)
        with silence():
            quiet_trainer(max_epochs=self.epochs, devices=1).fit(module, rows)
        return module.eval()

    def _inversion(self, trainer: Trainer, module: LightningModule, inversion: Inversion) -> dict[str, float]:
        """PSNR to the means of the members' classes, beside a grey image and the mean of all non-members."""
        low, span = self.low, self.high - self.low
        own, labels = self.x[self.members], self.y[self.members]
        classes = torch.nonzero(torch.bincount(labels)).flatten().tolist()
        means = torch.stack([own[labels == c].float().mean(0) for c in classes]).sub(low).div(span)
        rng = seeding.stream(self.seed, "attack.inversion")
        to_net: ToNet = lambda images: (low + span * images).to(self.x.dtype)  # noqa: E731
        found = inversion.reconstruct([module], classes, means.shape[1:], rng, to_net, module.device).cpu()
        near = means[:, None].expand_as(found).flatten(0, 1)
        grey, mean = torch.full_like(means, 0.5), self.x[~self.members].float().mean(0).sub(low).div(span)
        told = {
            "psnr": float(psnr(found.flatten(0, 1), near).mean()),
            "grey": float(psnr(grey, means).mean()),
            "mean": float(psnr(mean.expand_as(means), means).mean()),
        }
        if self._judge is not None:
            with torch.no_grad():
                seen = self._judge(to_net(found.flatten(0, 1)).to(self._judge.device)).argmax(1).cpu()
            told["same"] = float((seen == torch.tensor(classes).repeat_interleave(inversion.starts)).double().mean())
        if means.dim() == 4:
            figure = partial(images_figure, means, found[:, 0], [f"class {c}" for c in classes])
            show_figure(trainer, "attack/inversion", figure, trainer.global_step, self.folder)
        return told

    def _property(self, module: LightningModule, holds: Property) -> dict[str, float]:
        """Whether the training data has the property, by the answers of shadows."""
        free = torch.nonzero(~self.members).flatten()
        classes, rng = int(self.y.max()) + 1, seeding.stream(self.seed, "attack.properties")
        drawn = draw_clients(self.y[free], classes, holds, self.shadows, min(self.property_size, len(free)), rng)
        rows = [free[places] for side in drawn for places in side]
        made = enumerate(rows, start=self.shadows)  # after those of membership
        ask = partial(answer_profile, labels=self.y, classes=classes)
        answers = torch.stack([ask(self._logits(self._shadow(number, one))) for number, one in made])
        target = ask(self._logits(module))[None]
        found = infer_property(answers[: self.shadows], answers[self.shadows :], target, self.seed)
        best = max(found.values(), key=lambda one: one.shadow_auroc)
        truth = float(holds(self.y[self.members]))
        return {"answer": float(best.scores[0] >= best.line), "truth": truth, "shadow_auroc": best.shadow_auroc}

    def _leakage(self, trainer: Trainer, module: LightningModule, matching: Matching) -> dict[str, float]:
        """Return the PSNR of one non-member, by the analytic attack and by gradient matching."""
        place = int(self.members.sum())
        x, y = self.x[place : place + 1].to(module.device), self.y[place : place + 1].to(module.device)
        state = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
        leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
        grads = torch.autograd.grad(model_loss(module, F.cross_entropy)(leaves, x, y), [*leaves.values()])
        change = dict(zip(leaves, grads, strict=True))
        low, span = self.low, self.high - self.low
        head = list(change.values())[-1]
        labels = labels_of_head(head if head.dim() == 1 else head.sum(1), 1)
        match = matching.search(
            model_loss(module, F.cross_entropy),
            state,
            change,
            labels,
            x.shape,
            seeding.stream(self.seed, "attack.matching"),
            lambda images: low + span * images,
        )
        images = {"matching": low + span * match.images}
        first = next((value for value in change.values() if value.dim() == 2 and value.shape[1] == x[0].numel()), None)
        one = None if first is None else rank_one(first)
        if one is not None:
            ends = torch.tensor(self.low).to(x), torch.tensor(self.high).to(x)
            images["rank_one"] = in_range(one.direction, *ends, one.error)[:1].view_as(x)
        near = {name: float(psnr(image, x, span).clamp(max=150.0)) for name, image in images.items()}
        best = max(near, key=lambda name: near[name])
        shown = (x - low) / span, (images[best] - low) / span
        if x.dim() == 4:
            figure = partial(images_figure, *shown, [f"{best}\nlabel {int(y)}, found {int(labels)}"])
            show_figure(trainer, "attack/leakage", figure, trainer.global_step, self.folder)
        grey = float(psnr(torch.full_like(x, low + span / 2), x, span))
        return {"grey": grey, **near}
