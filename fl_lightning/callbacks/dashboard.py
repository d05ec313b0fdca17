"""The dashboard of a federated run, in TensorBoard and other loggers: pages, histograms, pictures, settings."""

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

#: Settings that every run has, so that runs of different methods fit into one table; the rest is one text.
COMMON = ("clients", "data.fraction", "rounds", "lr", "epochs", "batch_size")
#: Those that are shown at first: TensorBoard sorts by name, capitals before others, and shows five.
FIRST = ("method", "data", "partition", "net", "seed")
#: Metrics of that table, where they are logged; ``acc`` is the metric that counts.
METRICS = ("acc", "acc_worst10", "acc_majority", "acc_minority", "gap", "variance", "jain")
#: More clients than this are dots without a number on the map.
NAMED = 40
#: Numbers that are kept of a client's update, whatever the size of the model.
SKETCH = 256


class Dashboard(NamedArguments, Callback):
    """Lays TensorBoard out for a federated run.

    - **Custom scalars**: the pages Scores, Fairness, Privacy, Communication and Method, with charts of whatever the
      callbacks that are on have logged; a page that nothing was logged for is not there.
    - Shares are there in percent and bytes in MB (``percent/val/acc``, ``MB/comm/up_bytes``); what was logged stays as
      it is, for monitors, records and other loggers.
    - **Histograms** over clients: score, training loss, norm of the update.
    - **Images**: the partition, every client's score by round, a t-SNE map of the clients by their last updates, and
      the pictures of every callback that has a method ``dashboard_figures(trainer, module)`` which returns figures by
      name.
    - **HParams**: settings and last metrics, so that runs can be sorted.

    Other loggers get the settings as hyperparameters (method, net and data among them) and the pictures: Weights &
    Biases as images, MLflow as artifacts, the CSV logger and others with a folder as files in ``pictures/`` there.

    It adds five numbers to the log: ``val/acc_low``, ``val/acc_median`` and ``val/acc_high`` (the clients' first, fifth
    and ninth decile; ``acc`` is the task's headline metric), ``comm/up_total`` and ``comm/down_total``. Training is not
    changed by it.

    Args:
        images_every: draw pictures every so many rounds; 0 draws them at the end alone.
        histograms: whether histograms over clients are logged.
        tsne: whether the map of the clients is drawn.
    """

    def __init__(self, images_every: CountOrZero = 0, histograms: bool = True, tsne: bool = True) -> None:
        self.images_every, self.histograms, self.tsne = images_every, histograms, tsne
        self.history = ClientHistory()
        self.sketches: dict[int, Tensor] = {}
        self._layout: dict[str, Any] = {}
        self._session = False
        self._validated: set[str] = set()
        self._written: set[str] = set()

    # ---- what is collected ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other modules and forget earlier runs; keep Lightning from writing settings without metrics."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"Dashboard needs a federated method, not {type(pl_module).__name__}.")
        if stage == "fit" and not trainer.current_epoch:  # a run that is resumed gets its own back
            self.history, self.sketches = ClientHistory(), {}
        for logger in loggers.tensorboards(trainer):
            logger._default_hp_metric = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the partition."""
        self._layout, self._session, self._validated, self._written = {}, False, set(), set()
        draw = getattr(trainer.datamodule, "picture", None)  # type: ignore[attr-defined]
        if callable(draw) and trainer.loggers:
            with pictures.for_tiles():
                self._show(trainer, {"partition": draw()})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell loggers the settings, after Lightning has told them the module's arguments."""
        loggers.note_settings(trainer, settings_of(trainer, pl_module))

    def on_before_aggregate(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Note how far and in which direction every client wants to go."""
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
        """Add the traffic up."""
        module: Any = pl_module
        for name, total in (("up", module.bytes_up), ("down", module.bytes_down)):
            _log(pl_module, f"comm/{name}_total", float(total))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the band in which the clients lie, and their histogram."""
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
        """Write what the validation logged in percent, too."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        numbers = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
        self._validated |= set(numbers)
        self._write(trainer, pl_module, numbers, loggers.step_of(trainer))

    # ---- what is shown --------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay the pages out, as soon as it is known what is logged, and again when something new is."""
        numbers = {name: value for name, value in trainer.callback_metrics.items() if name not in self._validated}
        self._write(trainer, pl_module, numbers, loggers.step_of(trainer) - 1)
        self._lay_out(trainer, pl_module)
        self._note_settings(trainer, pl_module)
        if self.images_every and (trainer.current_epoch + 1) % self.images_every == 0:
            self._show(trainer, self.figures(trainer, pl_module))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last pictures, and close the table's row."""
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
        """The pictures by name: clients by round, the map of the clients, and those of the other callbacks."""
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
        """Write numbers in the units that they are shown in, to TensorBoard alone: monitors go by what was logged."""
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
        """Begin the run's row in the table of settings; TensorBoard fills in the metrics' last values itself."""
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
        """Clients by round, and their last updates."""
        return {"clients": self.history.state_dict(), "sketches": dict(self.sketches)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self.history.load_state_dict(state_dict["clients"])
        self.sketches = dict(state_dict["sketches"])


def columns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as columns that all runs have: the common ones, and the others in one text.

    TensorBoard takes the columns of all runs from the first one it finds, so they must not depend on the method.

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
    """A chart as TensorBoard lays it out: its title with the unit, and where its lines are in that unit."""
    label = unit(chart.tags[0].rstrip("$"), measure)[0]
    tags = [in_unit(tag, measure)[0] if tag[-1:] != "$" else f"{in_unit(tag[:-1], measure)[0]}$" for tag in chart.tags]
    title = f"{chart.title} ({label})" if label else chart.title
    return title, ["Margin" if chart.band else "Multiline", tags]


def clients_map(points: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A map of clients in the plane: similar directions lie near each other.

    Args:
        points: one row per client, shape (clients, n).

    Returns:
        Places, shape (clients, 2).
    """
    from sklearn.manifold import TSNE

    rows = torch.nn.functional.normalize(points.double(), dim=1).numpy()
    perplexity = min(30.0, max(2.0, (len(rows) - 1) / 3))
    places: np.ndarray[Any, np.dtype[np.float64]] = TSNE(
        perplexity=perplexity, init="pca", random_state=0, max_iter=500
    ).fit_transform(rows)
    return places


def _update(tensors: State, state: State) -> Tensor:
    """A client's update as one vector: floating entries, less the server's where it has them."""
    parts = [
        (value - state[name] if name in state and state[name].shape == value.shape else value).detach().flatten()
        for name, value in tensors.items()
        if value.is_floating_point()
    ]
    return torch.cat(parts).float().cpu() if parts else torch.empty(0)


def _sketched(updates: Mapping[int, Tensor], seed: int) -> dict[int, Tensor]:
    """Every update in few numbers that keep angles: entries are added up, with random signs, in random buckets."""
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
