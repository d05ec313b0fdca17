"""The dashboard of a federated run in TensorBoard and other loggers: pages, histograms, figures, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fl_lightning import loggers, pictures, seeding
from fl_lightning.arguments import NamedArguments
from fl_lightning.callbacks.pages import Chart, charts, in_unit, unit
from fl_lightning.callbacks.record import ClientHistory, settings_of
from fl_lightning.errors import FederationError
from fl_lightning.measure import Measure
from fl_lightning.metrics.fairness import scored
from fl_lightning.module import FederatedModule
from fl_lightning.ranges import CountOrZero
from fl_lightning.wire import Message, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Settings common to all runs, which have columns of their own; the rest is one text.
COMMON = ("clients", "data.fraction", "rounds", "lr", "epochs", "batch_size")
#: Settings shown first: TensorBoard sorts by name, capitals first, and shows five.
FIRST = ("method", "data", "partition", "net", "seed")
#: Metrics of the table, if logged; ``acc`` stands for the headline metric.
METRICS = ("acc", "acc_worst10", "acc_majority", "acc_minority", "gap", "variance", "jain")
#: With more clients than this, dots on the map have no number.
NAMED = 40
#: Dimension of the sketch of a client's update.
SKETCH = 256


class Dashboard(NamedArguments, Callback):
    """Lays TensorBoard out for a federated run.

    - **Custom scalars**: the pages Scores, Fairness, Privacy, Communication and Method, with charts of all logged
      metrics; empty pages are left out.
    - Shares are shown in percent and bytes in MB (``percent/val/acc``, ``MB/comm/up_bytes``); the logged metrics do not
      change, for monitors, records and other loggers.
    - **Histograms** over clients: score, training loss, norm of the update.
    - **Images**: the partition, every client's score by round, a t-SNE map of the clients by their last updates, and
      the figures of every callback with a method ``dashboard_figures(trainer, module)`` that returns figures by name.
    - **HParams**: settings and last metrics, to sort runs by.

    Other loggers get the settings as hyperparameters (including method, net and data) and the figures: Weights & Biases
    as images, MLflow as artifacts, the CSV logger and other loggers with a folder as files in its ``pictures/``.

    Five metrics are added to the log: ``val/acc_low``, ``val/acc_median`` and ``val/acc_high`` (the clients' first,
    fifth and ninth decile; ``acc`` stands for the task's headline metric), ``comm/up_total`` and ``comm/down_total``.
    Training is not changed.

    Args:
        images_every: rounds between figures; 0 draws them at the end only.
        histograms: whether to log histograms over clients.
        tsne: whether to draw the map of the clients.
    """

    def __init__(self, images_every: CountOrZero = 0, histograms: bool = True, tsne: bool = True) -> None:
        self.images_every, self.histograms, self.tsne = images_every, histograms, tsne
        self.history = ClientHistory()
        self.sketches: dict[int, Tensor] = {}
        self._layout: dict[str, Any] = {}
        self._session = False
        self._validated: set[str] = set()
        self._written: set[str] = set()

    # ---- collection -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other modules, reset earlier runs, and stop Lightning from writing settings without metrics."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"Dashboard needs a federated method, not {type(pl_module).__name__}.")
        if stage == "fit" and not trainer.current_epoch:  # a resumed run restores its own
            self.history, self.sketches = ClientHistory(), {}
        for logger in loggers.tensorboards(trainer):
            logger._default_hp_metric = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the partition."""
        self._layout, self._session, self._validated, self._written = {}, False, set(), set()
        draw = getattr(trainer.datamodule, "picture", None)  # type: ignore[attr-defined]
        if callable(draw) and trainer.loggers:
            with pictures.for_tiles():
                self._show(trainer, {"partition": draw()})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the settings, after Lightning has logged the module's arguments."""
        loggers.note_settings(trainer, settings_of(trainer, pl_module))

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Record norm and sketch of every client's update."""
        module: Any = pl_module
        if not trainer.loggers or not messages:
            return
        state = module.server_state()
        updates = {message.client: _update(message.tensors, state) for message in messages}
        updates = {client: update for client, update in updates.items() if len(update)}
        if self.tsne:
            self.sketches |= _sketched(updates, module.seed)
        if self.histograms:
            norms = torch.stack([update.norm() for update in updates.values()]) if updates else torch.empty(0)
            self._histogram(trainer, "clients/update_norm", norms)
            self._histogram(trainer, "clients/train_loss", torch.tensor([message.loss for message in messages]))

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Accumulate the traffic."""
        module: Any = pl_module
        for name, total in (("up", module.bytes_up), ("down", module.bytes_down)):
            _log(pl_module, f"comm/{name}_total", float(total))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log deciles and histogram of the clients' scores."""
        module: Any = pl_module
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scores, headline = module.evaluator.headline(module.task), module.task.headline
        self.history.add(trainer.current_epoch, scores)
        known = scored(scores).double()
        if len(known):
            marks = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
            for name, value in zip(("low", "median", "high"), known.quantile(marks), strict=True):
                _log(pl_module, f"{module.federation.validated}/{headline}_{name}", value)
            if self.histograms:
                share = module.task.measure.share
                name = f"percent/clients/{headline}" if share else f"clients/{headline}"
                self._histogram(trainer, name, module.task.measure.scale * known)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation metrics in display units, too."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        numbers = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
        self._validated |= set(numbers)
        self._write(trainer, pl_module, numbers, loggers.step_of(trainer))

    # ---- display --------------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out the pages once metrics are known, and again for new ones."""
        numbers = {name: value for name, value in trainer.callback_metrics.items() if name not in self._validated}
        self._write(trainer, pl_module, numbers, loggers.step_of(trainer) - 1)
        self._lay_out(trainer, pl_module)
        self._note_settings(trainer, pl_module)
        if self.images_every and (trainer.current_epoch + 1) % self.images_every == 0:
            self._show(trainer, self.figures(trainer, pl_module))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last figures, and finish the row in the table."""
        from torch.utils.tensorboard.summary import hparams

        numbers = {name: value for name, value in trainer.callback_metrics.items() if name not in self._written}
        self._write(trainer, pl_module, numbers, loggers.step_of(trainer))
        self._lay_out(trainer, pl_module)
        self._show(trainer, self.figures(trainer, pl_module))
        if self._session:
            for logger in loggers.tensorboards(trainer):
                logger.experiment.file_writer.add_summary(hparams({}, {})[2])  # type: ignore[no-untyped-call]
                logger.experiment.flush()

    def figures(self, trainer: Trainer, module: Any) -> dict[str, Figure]:
        """Return figures by name: clients by round, the map of the clients, and those of other callbacks."""
        if not trainer.loggers:
            return {}
        with pictures.for_tiles():
            return self._figures(trainer, module)

    def _figures(self, trainer: Trainer, module: Any) -> dict[str, Figure]:
        rounds, scores = self.history.table()
        measure, found = module.task.measure, dict[str, Any]()
        if rounds:
            title = f"{measure.title} of every client"
            found[f"clients/{measure.title}_by_round"] = pictures.heat_map(
                [round + 1 for round in rounds], scores.double().numpy(), title, measure
            )
        if self.tsne and len(self.sketches) > 3:
            found["clients/tsne_of_updates"] = self._map(module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            offered = getattr(callback, "dashboard_figures", None)
            if callable(offered):
                found |= offered(trainer, module)
        return found

    def _map(self, module: Any) -> Figure:
        clients = sorted(self.sketches)
        points = clients_map(torch.stack([self.sketches[client] for client in clients]))
        groups = module.federation.meta.get("mode")
        labels = (
            ["clients"] * len(clients) if groups is None else [f"mode {groups[module.client_of(c)]}" for c in clients]
        )
        names = [str(client) for client in clients] if len(clients) <= NAMED else ()
        return pictures.scatter(points, labels, "t-SNE of the clients' last updates", names)

    def _write(self, trainer: Trainer, module: Any, numbers: Mapping[str, Tensor], step: int) -> None:
        """Write metrics in display units, to TensorBoard only; monitors use the logged ones."""
        for name, value in numbers.items():
            tag, factor = in_unit(name, module.task.measure)
            self._written.add(name)
            if tag != name:
                for logger in loggers.tensorboards(trainer):
                    logger.experiment.add_scalar(tag, factor * float(value), step)

    def _lay_out(self, trainer: Trainer, module: Any) -> None:
        measure = module.task.measure
        layout: dict[str, Any] = {
            page: dict(_entry(chart, measure) for chart in shown)
            for page, shown in charts(trainer.callback_metrics, measure.name).items()
        }
        if layout != self._layout and layout:
            self._layout = layout
            for logger in loggers.tensorboards(trainer):
                logger.experiment.add_custom_scalars(layout)

    def _note_settings(self, trainer: Trainer, module: Any) -> None:
        """Start the run's row in the table of settings; TensorBoard adds the metrics' last values."""
        from torch.utils.tensorboard.summary import hparams

        split = module.federation.validated
        names = [f"{split}/{name.replace('acc', module.task.headline)}" for name in METRICS]
        shown = {name: in_unit(name, module.task.measure)[0] for name in names if name in trainer.callback_metrics}
        metrics = dict.fromkeys(shown.values(), 0.0)
        if self._session or not metrics:
            return
        self._session = True
        experiment, start, _ = hparams(columns(settings_of(trainer, module)), metrics)  # type: ignore[no-untyped-call]
        for logger in loggers.tensorboards(trainer):
            for summary in (experiment, start):
                logger.experiment.file_writer.add_summary(summary)

    def _show(self, trainer: Trainer, figures: Mapping[str, Figure]) -> None:
        for name, figure in figures.items():
            loggers.show(trainer, name, figure, loggers.step_of(trainer))

    def _histogram(self, trainer: Trainer, name: str, values: Tensor) -> None:
        finite = values[values.isfinite()]
        for logger in loggers.tensorboards(trainer):
            if len(finite):
                logger.experiment.add_histogram(name, finite, loggers.step_of(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return scores by round and the clients' last updates."""
        return {"clients": self.history.state_dict(), "sketches": dict(self.sketches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.history.load_state_dict(state_dict["clients"])
        self.sketches = dict(state_dict["sketches"])


def columns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as columns common to all runs, with all other settings in one text.

    TensorBoard takes the columns from the first run it finds, so they must not depend on the method.

    Example:
        >>> columns({"method": "FedProx", "lr": 0.1, "mu": 0.5, "momentum": 0.0})["other"]
        'mu=0.5'
    """
    common = (
        {name.capitalize(): settings.get(name) for name in FIRST}
        | {"Seed": str(settings.get("seed", ""))}
        | {name: settings.get(name) for name in COMMON}
    )
    rest = {k: v for k, v in settings.items() if k not in (*FIRST, *COMMON) and v not in (None, 0.0, False)}
    texts = (f"{k}={v}" for k, v in rest.items())
    return {k: "" if v is None else v for k, v in common.items()} | {"other": " ".join(texts)}


def _entry(chart: Chart, measure: Measure) -> tuple[str, list[Any]]:
    """Convert a chart to TensorBoard's layout: title with unit, and tags of its lines in that unit."""
    label = unit(chart.tags[0].rstrip("$"), measure)[0]
    tags = [in_unit(tag, measure)[0] if tag[-1:] != "$" else f"{in_unit(tag[:-1], measure)[0]}$" for tag in chart.tags]
    title = f"{chart.title} ({label})" if label else chart.title
    return title, ["Margin" if chart.band else "Multiline", tags]


def clients_map(points: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Map clients to the plane such that similar directions are near each other.

    Args:
        points: one row per client, shape (clients, n).

    Returns:
        Coordinates, shape (clients, 2).
    """
    from sklearn.manifold import TSNE

    rows = torch.nn.functional.normalize(points.double(), dim=1).numpy()
    perplexity = min(30.0, max(2.0, (len(rows) - 1) / 3))
    places: np.ndarray[Any, np.dtype[np.float64]] = TSNE(
        perplexity=perplexity, init="pca", random_state=0, max_iter=500
    ).fit_transform(rows)
    return places


def _update(tensors: State, state: State) -> Tensor:
    """Return a client's update as one vector: floating-point entries minus the server's, if any."""
    parts = [
        (value - state[name] if name in state and state[name].shape == value.shape else value).detach().flatten()
        for name, value in tensors.items()
        if value.is_floating_point()
    ]
    return torch.cat(parts).float().cpu() if parts else torch.empty(0)


def _sketched(updates: Mapping[int, Tensor], seed: int) -> dict[int, Tensor]:
    """Sketch every update by a count sketch, which preserves angles: random signs, random buckets."""
    found = {}
    buckets: dict[int, tuple[Tensor, Tensor]] = {}
    for client, update in updates.items():
        size = len(update)
        if size not in buckets:
            rng = seeding.stream(seed, "dashboard")
            buckets[size] = (
                torch.from_numpy(rng.integers(0, SKETCH, size)),
                torch.from_numpy(rng.integers(0, 2, size).astype(np.float32) * 2 - 1),
            )
        place, sign = buckets[size]
        found[client] = torch.zeros(SKETCH, dtype=update.dtype).index_add_(0, place, sign * update)
    return found


def _log(module: LightningModule, name: str, value: float | Tensor) -> None:
    module.log(name, value, on_step=False, on_epoch=True, batch_size=1)
