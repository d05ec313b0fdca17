"""The ledger: name, shape, type and size of all sent entries, by round and client."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.callbacks.journal import Journal
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.sheet import markdown
from fl_lightning.wire import Message, State, nbytes

Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
#: Name, shape, type and bytes of one entry of a message.
Entry = tuple[str, str, str, int]


class Line(NamedTuple):
    """One message."""

    round: int
    client: int
    direction: Direction
    layout: int
    """Index of the message's layout."""
    bytes: int
    stage: int = 0
    """Stage of the round; most rounds have one."""


class Total(NamedTuple):
    """Totals of all messages in one direction."""

    bytes: int = 0
    messages: int = 0


class LedgerCallback(FederatedCallback):
    """Records every message, up and down, and fails the run if a private entry is sent.

    Messages of the same names, shapes and types share a *layout*, which is stored once. ``ledger.csv`` in the log
    folder has one line per message; at the end of a fit, ``ledger_layouts.csv`` (the entries of every layout) and
    ``ledger.md`` (the totals) are written. ``ledger_joined.csv`` lists what each client sent when it joined. A
    checkpoint stores only the totals and the length of the file: keep the folder of a run to be resumed.
    ``ledger/up_bytes_total`` and ``ledger/down_bytes_total`` are logged after every round. Bytes are uncompressed.

    Private entries are the net's ``private_names`` and all names in a client's snapshot.

    Args:
        assert_private: end the run with an error if a private entry is sent.
        folder: folder of the files; None means the Trainer's log folder.
    """

    def __init__(self, assert_private: bool = True, folder: str | None = None) -> None:
        self.assert_private, self.folder = assert_private, folder
        #: The entries of every layout.
        self.layouts: list[tuple[Entry, ...]] = []
        self._journal = Journal()
        self._totals = dict.fromkeys(DIRECTIONS, Total())  # of completed rounds
        self._rounds = 0
        self._now: list[Line] = []  # of the current round

    @property
    def lines(self) -> list[Line]:
        """Return all messages in order, from the file and the current round."""
        return [_line(row) for row in csv.reader(self._journal.text().splitlines()[1:])] + self._now

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that are not federated, and reset an earlier run; a resumed one restores its own state."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"LedgerCallback needs a federated method, not {type(pl_module).__name__}.")
        if stage == "fit" and not trainer.current_epoch:
            self._journal.forget()
            self._totals, self._rounds, self._now = dict.fromkeys(DIRECTIONS, Total()), 0, []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open or resume the file, and record the clients' introductions."""
        self._journal.open(self._path(trainer), ",".join(Line._fields) + "\r\n")
        self._write_joined(trainer, pl_module)

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Remove messages of an interrupted round or stage, which are sent again."""
        assert isinstance(pl_module, FederatedModule)
        now = (round, pl_module.completed_stages)
        self._now = [line for line in self._now if (line.round, line.stage) < now]

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Record a message to a client."""
        self._note(trainer, pl_module, client, "down", message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Record a message from a client."""
        self._note(trainer, pl_module, client, "up", message.tensors)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Check against the round's snapshots, write the lines and log the totals."""
        for message in messages:
            self._check(pl_module, message.client, message.tensors)
        self._close()
        for direction in ("up", "down"):
            name = f"ledger/{direction}_bytes_total"
            pl_module.log(name, float(self.total(direction)), on_step=False, on_epoch=True, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layouts and the totals."""
        path = self._path(trainer)
        if path is None:
            return
        self._write_joined(trainer, pl_module)  # some joined late
        entries = ((i, *entry) for i, layout in enumerate(self.layouts) for entry in layout)
        path.with_name("ledger_layouts.csv").write_text(_csv(("layout", "name", "shape", "dtype", "bytes"), *entries))
        path.with_name("ledger.md").write_text(self.table())

    def total(self, direction: Direction) -> int:
        """Return the number of bytes sent in one direction."""
        return self._total(direction).bytes

    def run_metrics(self) -> dict[str, float]:
        """Return bytes per round and per message, for the tables of ``fl-lightning reproduce``."""
        found: dict[str, float] = {}
        for direction in DIRECTIONS:
            total = self._total(direction)
            found[f"{direction}_bytes_per_round"] = total.bytes / max(self._seen(), 1)
            found[f"{direction}_bytes_per_client"] = total.bytes / max(total.messages, 1)
        return found

    def table(self) -> str:
        """Return the totals in Markdown."""
        per, rows = self.run_metrics(), []
        for way in DIRECTIONS:
            total = self._total(way)
            each = (f"{per[f'{way}_bytes_per_{unit}']:.0f}" for unit in ("round", "client"))
            rows.append([way, self._seen(), total.messages, total.bytes, *each])
        return markdown(["direction", "rounds", "messages", "bytes", "bytes per round", "bytes per message"], rows)

    def state_dict(self) -> dict[str, Any]:
        """Return totals, layouts, the current round and the length of the file, for a resumed run."""
        return {
            "journal": self._journal.state_dict(),
            "totals": {direction: list(total) for direction, total in self._totals.items()},
            "rounds": self._rounds,
            "now": [list(line) for line in self._now],
            "layouts": [[list(e) for e in layout] for layout in self.layouts],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._journal.load_state_dict(state_dict["journal"])
        self._totals = {direction: Total(*state_dict["totals"][direction]) for direction in DIRECTIONS}
        self._rounds, self._now = state_dict["rounds"], [Line(*line) for line in state_dict["now"]]
        self.layouts = [tuple((n, s, d, b) for n, s, d, b in layout) for layout in state_dict["layouts"]]

    def _path(self, trainer: Trainer) -> Path | None:
        folder = self.folder or trainer.log_dir  # broadcast, so call it on every rank
        written = folder is not None and not trainer.fast_dev_run and trainer.is_global_zero  # type: ignore[attr-defined]
        return Path(folder) / "ledger.csv" if written else None  # type: ignore[arg-type]

    def _write_joined(self, trainer: Trainer, module: Any) -> None:
        path = self._path(trainer)
        if path is not None:
            told = ((c, one.samples, _shape(one.shape), _told(one.told)) for c, one in enumerate(module.roster))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name("ledger_joined.csv").write_text(_csv(("client", "samples", "shape", "told"), *told))

    def _close(self) -> None:
        """Write the round's lines and add them to the totals."""
        self._totals = {direction: self._total(direction) for direction in DIRECTIONS}
        self._rounds = self._seen()
        self._journal.add(_csv(*self._now))
        self._now = []

    def _total(self, direction: Direction) -> Total:
        earlier, own = self._totals[direction], [line.bytes for line in self._now if line.direction == direction]
        return Total(earlier.bytes + sum(own), earlier.messages + len(own))

    def _seen(self) -> int:
        return self._rounds + bool(self._now)

    def _note(self, trainer: Trainer, module: Any, client: int, direction: Direction, message: State) -> None:
        self._check(module, client, message)
        layout = tuple(
            (n, _shape(v.shape), str(v.dtype).removeprefix("torch."), nbytes({n: v})) for n, v in message.items()
        )
        if layout not in self.layouts:
            self.layouts.append(layout)
        size = sum(entry[3] for entry in layout)
        number = self.layouts.index(layout)
        self._now.append(Line(trainer.current_epoch, client, direction, number, size, module.completed_stages))

    def _check(self, module: Any, client: int, message: State) -> None:
        if not self.assert_private:
            return
        private = set(module.private_names) | set(module.snapshots[client].private)
        leaked = sorted(private.intersection(message))
        if leaked:
            raise FederationError(
                f"A message of client {client} contains {', '.join(leaked)}, which is private in "
                f"{type(module).__name__}: correct leave or message_down, or set assert_private=False."
            )


def _csv(*rows: Iterable[Any]) -> str:
    """Format rows as lines of CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _line(row: list[str]) -> Line:
    round, client, direction, layout, size, stage = row
    way: Direction = "up" if direction == "up" else "down"
    return Line(int(round), int(client), way, int(layout), int(size), int(stage))


def _shape(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _told(state: State) -> str:
    """Format entries with their values, if there are few."""
    return "; ".join(f"{n} {v.flatten().tolist() if v.numel() <= 20 else _shape(v.shape)}" for n, v in state.items())
