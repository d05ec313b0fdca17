"""Membership inference on the clients of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import Trainer

from fl_lightning.callbacks.attacks import ALL_VIEWS, AttackCallback, ViewName
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.privacy.data import AttackData, attack_data
from fl_lightning.privacy.membership import infer_membership
from fl_lightning.privacy.report import Row
from fl_lightning.privacy.shadows import train_shadows
from fl_lightning.privacy.wiretap import Run


class MembershipInferenceCallback(AttackCallback):
    """Asks of samples whether they were in a client's training data, with the attacks of :mod:`~fl_lightning.privacy`.

    The adversary trains shadows: by default they are the clients of a federation of its own, which begins at the common
    initial weights and trains for as many rounds as the target did. The rows it uses, the members and the
    non-members are disjoint (:func:`~fl_lightning.privacy.attack_data`).

    Reported for each client, view, assumption and attack (``shadow``, ``loss``, ``lira``): ``accuracy`` and ``f1`` at
    the line that the shadows teach, ``auroc``, ``best_accuracy`` at the best line in hindsight, ``tpr_at_1`` and
    ``tpr_at_01``, the share of members found with 1% and 0.1% of false alarms. Strongest is the one of largest AUROC.

    Args:
        views: the adversaries.
        shadows: number of shadow models; ``lira`` needs two.
        samples: members and non-members of each client, and rows of a shadow, at most.
        shadow_start: shadows begin at the ``initial`` weights, or at the global model as it is now (``current``).
        shadow_rounds: rounds that shadows train for; None means as many as the target, and one if they begin at the
            current model.
        shadows_together: the shadows are clients of one federation, as the target is; else each is the only client of
            one, and knows its samples better than any client of the target does.
        clients: how many clients are attacked, those heard last (after a test, picked at random); None means all.
        every: attack after every so many rounds too, not only at the end.
        memory: how many messages of a client the server's view uses.
        group: what of the federation's ``meta`` divides the clients in the report.
        folder: where the report is written; None means the Trainer's log folder.
    """

    attack = "membership"
    metric_prefix = "mia"
    by = "auroc"

    def __init__(
        self,
        views: Sequence[ViewName] = ALL_VIEWS,
        shadows: int = 3,
        samples: int = 1000,
        shadow_start: Literal["initial", "current"] = "initial",
        shadow_rounds: int | None = None,
        shadows_together: bool = True,
        clients: int | None = 10,
        every: int | None = None,
        memory: int = 3,
        group: str = "mode",
        folder: str | None = None,
    ) -> None:
        super().__init__(views, clients, every, memory, group, folder)
        for name, value in (("shadows", shadows), ("samples", samples), ("shadow_rounds", shadow_rounds)):
            if value is not None and value < 1:
                raise FederationError(f"{name} must be 1 or more, not {value}.")
        if shadow_start not in ("initial", "current"):
            raise FederationError(f"shadow_start must be initial or current, not {shadow_start!r}.")
        self.shadows, self.samples = shadows, samples
        self.shadow_start, self.shadow_rounds, self.shadows_together = shadow_start, shadow_rounds, shadows_together
        #: The rows of the last attack.
        self.data: AttackData | None = None

    def strike(self, trainer: Trainer, run: Run) -> list[Row]:
        """Train shadows and attack."""
        module = run.module
        self.data = attack_data(module.federation, run.clients, module.seed, self.samples, self.shadows)
        inside = [rows for rows, _ in self.data.shadows]
        current = self.shadow_start == "current"
        rounds = self.shadow_rounds or (1 if current else max(1, module.completed_rounds))
        start = self._start(module, current)
        shadows = train_shadows(start, module.federation, inside, rounds, trainer, self.shadows_together, self.memory)
        return infer_membership(run, shadows, self.data, self.views, self._groups)

    def notes(self) -> dict[str, Any]:
        """How many samples and shadows, and whose rows they were."""
        assert self.data is not None
        sizes = [len(rows) for rows in self.data.members.values()]
        return {
            "members and as many non-members per client": f"{min(sizes)} to {max(sizes)}",
            "shadows": f"{self.shadows} of {len(self.data.shadows[0][0])} rows, from the {self.shadow_start} model",
            "rows of non-members and adversary": self.data.source,
        }

    def _start(self, module: FederatedModule, current: bool) -> FederatedModule:
        assert self._initial is not None
        if not current:
            if not self._began:
                raise FederationError(
                    "How the run began is not known, as the module was trained before: pass a new module and "
                    "ckpt_path, or set shadow_start='current'."
                )
            return self._initial
        start = copy.deepcopy(self._initial)
        start.load_state_dict(module.state_dict())
        return start
