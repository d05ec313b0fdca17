"""Membership inference on the clients of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.callbacks.attacks import ALL_VIEWS, AttackCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.data import AttackData, attack_data, deal_shadows
from fl_lightning.privacy.figures import roc_figure
from fl_lightning.privacy.membership import Scored, infer_membership
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.shadows import train_shadows
from fl_lightning.privacy.wiretap import Run
from fl_lightning.ranges import Count


class MembershipInferenceCallback(AttackCallback):
    """Infers whether samples were in a client's training data, with the attacks of :mod:`~fl_lightning.privacy`.

    The adversary trains shadow federations with as many clients as the target, which start from the common initial
    weights and train for the same number of rounds with the same fraction of clients; each uses a random half of the
    adversary's rows. The adversary's rows, the members and the non-members are disjoint
    (:func:`~fl_lightning.privacy.attack_data`), unless ``online`` is set.

    Reported for each client, view, assumption and attack (``shadow``, ``loss``, and with three shadows ``lira`` and
    ``rmia``): ``accuracy`` and ``f1`` at the threshold learned from the shadows, ``auroc``, ``best_accuracy`` at the
    best threshold in hindsight, ``tpr_at_1`` and ``tpr_at_01``, the true positive rates at false positive rates of 1%
    and 0.1% (NaN with too few non-members), ends of 95% intervals, and ``shadow_auroc``. The strongest attack is the
    best one on shadows, because the attacker does not know the best one on the target.

    With a TensorBoard logger, the ROC curves are logged as the image ``membership/<view>``. All raw scores are saved as
    ``membership.pt`` in the log folder.

    Args:
        views: the adversaries.
        shadows: number of shadow federations, each of which costs as much as the target; ``lira`` and ``rmia`` need
            three.
        samples: maximum number of members and non-members of each client, and of rows of a shadow's client.
        shadow_start: shadows start from the ``initial`` weights or from the ``current`` global model.
        shadow_rounds: number of rounds of shadows; None means that of the target, or one with the current model.
        shadows_together: whether a shadow federation has as many clients as the target; otherwise one, which overfits
            more than the target's clients.
        online: also train half of the shadow federations on each attacked sample, and carry out ``lira_online`` and
            ``rmia_online``.
        clients: number of attacked clients, the most recent ones (after a test, random ones); None means all.
        every: also attack every ``every`` rounds; None attacks at the end only.
        memory: number of a client's messages that the server's view uses.
        group: name in the federation's ``meta`` by which the report groups clients.
        folder: folder of the report; None means the Trainer's log folder.
    """

    attack = "membership"
    metric_prefix = "mia"
    by = "auroc"
    pick = "shadow_auroc"

    def __init__(
        self,
        views: Sequence[str] = ALL_VIEWS,
        shadows: Count = 4,
        samples: Count = 1000,
        shadow_start: Literal["initial", "current"] = "initial",
        shadow_rounds: Count | None = None,
        shadows_together: bool = True,
        online: bool = False,
        clients: Count | None = 10,
        every: Count | None = None,
        memory: Count = 3,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, memory, group, folder)
        self.shadows, self.samples, self.online = shadows, samples, online
        self.shadow_start, self.shadow_rounds, self.shadows_together = shadow_start, shadow_rounds, shadows_together
        #: Rows of the last attack.
        self.data: AttackData | None = None
        #: Raw scores of the last attack.
        self.scored: list[Scored] = []
        self._dealt: list[list[Tensor]] = []

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Train shadows and attack."""
        module = run.module
        federation = module.federation
        clients = federation.num_clients if self.shadows_together else 1
        self.data = data = attack_data(federation, run.clients, module.seed, self.samples, clients)
        size = min(self.samples, int(federation.train.sizes.median()))
        wanted = torch.cat([*data.members.values(), *data.nonmembers.values()]) if self.online else None
        self._dealt = deal_shadows(data.pool, self.shadows, clients, size, module.seed, wanted)
        current = self.shadow_start == "current"
        rounds = self.shadow_rounds or (1 if current else max(1, module.completed_rounds))
        fraction = getattr(module.datamodule, "fraction", 1.0) if self.shadows_together else 1.0
        start = self._start(module, current)
        shadows = train_shadows(start, federation, self._dealt, rounds, trainer, self.memory, fraction, self.sums)
        rows, self.scored = infer_membership(run, shadows, data, self.views, self._groups, self.online)
        self._show(trainer, module.completed_rounds)
        return rows

    def notes(self) -> dict[str, Any]:
        """Return numbers of samples and shadows, and the source of rows."""
        assert self.data is not None
        sizes = [len(rows) for rows in self.data.members.values()]
        each = [len(part) for part in self._dealt[0]]
        return {
            "members and as many non-members per client": f"{min(sizes)} to {max(sizes)}",
            "shadows": f"{self.shadows} federations of {len(each)} clients of {each[0]} rows, from the "
            f"{self.shadow_start} model",
            "rows of non-members and adversary": self.data.source,
        }

    def _show(self, trainer: Trainer, rounds: int) -> None:
        """Log the ROC curves and keep the raw scores."""
        for view in dict.fromkeys(one.how["view"] for one in self.scored):
            curves: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
            for one in self.scored:
                if one.how["view"] == view:
                    name = f"{one.how['assumption']}, {one.how['variant']}"
                    scores, members = curves.setdefault(name, ([], []))
                    scores.append(one.result.scores)
                    members.append(one.result.members)
            joined = {name: (torch.cat(scores), torch.cat(members)) for name, (scores, members) in curves.items()}
            self.picture(trainer, f"membership/{view}", partial(roc_figure, joined), rounds)
        folder = self.folder or trainer.log_dir
        if folder is not None and trainer.is_global_zero:
            Path(folder).mkdir(parents=True, exist_ok=True)
            raw = [
                {"client": o.client, **o.how, "scores": o.result.scores, "members": o.result.members}
                for o in self.scored
            ]
            torch.save(raw, Path(folder) / "membership.pt")

    def _start(self, module: FederatedModule, current: bool) -> FederatedModule:
        assert self._initial is not None
        if not current:
            if not self._began:
                raise FederationError(
                    "The initial weights of the run are unknown, as the module was trained before: pass a new module "
                    "and ckpt_path, or set shadow_start='current'."
                )
            return self._initial
        start = copy.deepcopy(self._initial)
        start.load_state_dict(module.state_dict())
        return start
