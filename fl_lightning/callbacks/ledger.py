"""The ledger: name, shape, type and size of everything that crossed the wire, by round and client."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.callbacks.base import FederatedCallback
from fl_lightning.errors import FederationError
from fl_lightning.module import FederatedModule
from fl_lightning.wire import Message, State, nbytes

Direction = Literal["up", "down"]
#: Name, shape, type and bytes of one entry of a message.
Entry = tuple[str, str, str, int]


class Line(NamedTuple):
    """One message."""

    round: int
    client: int
    direction: Direction
    layout: int
    """Which of the ledger's layouts the message has."""
    bytes: int
    stage: int = 0
    """The stage of the round; most rounds have one."""


class LedgerCallback(FederatedCallback):
    """Writes down every message, up and down, and fails the run if a private entry crosses.

    Messages of the same names, shapes and types have one *layout*, noted once. At the end of a fit the log folder gets
    ``ledger.csv`` (one line per message), ``ledger_layouts.csv`` (the entries of every layout) and ``ledger.md`` (the
    totals). ``ledger/up_bytes_total`` and ``ledger/down_bytes_total`` are logged after every round. Nothing is
    compressed: these are the bytes that a later compression has to beat.

    Private are the entries of the net that the method says stay (``private_names``) and all names in a client's
    snapshot.

    Args:
        assert_private: end the run with an error if a private entry crosses.
        folder: where the files are written; None means the Trainer's log folder.
    """

    def __init__(self, assert_private: bool = True, folder: str | None = None) -> None:
        self.assert_private, self.folder = assert_private, folder
        #: All messages in the order in which they crossed.
        self.lines: list[Line] = []
        #: The entries of every layout.
        self.layouts: list[tuple[Entry, ...]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what is no federated method."""
        if not isinstance(pl_module, FederatedModule):
            raise FederationError(f"LedgerCallback needs a federated method, not {type(pl_module).__name__}.")

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, round: int, cohort: list[int]) -> None:
        """Forget messages of a round, or of its stages, that were broken off and are sent again."""
        assert isinstance(pl_module, FederatedModule)
        now = (round, pl_module.completed_stages)
        self.lines = [line for line in self.lines if (line.round, line.stage) < now]

    def on_client_start(self, trainer: Trainer, pl_module: LightningModule, client: int, message: State) -> None:
        """Note what goes down."""
        self._note(trainer, pl_module, client, "down", message)

    def on_message_up(self, trainer: Trainer, pl_module: LightningModule, client: int, message: Message) -> None:
        """Note what goes up."""
        self._note(trainer, pl_module, client, "up", message.tensors)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, messages: list[Message]) -> None:
        """Check again, now that the round's snapshots say what clients kept, and log the totals."""
        for message in messages:
            self._check(pl_module, message.client, message.tensors)
        for direction in ("up", "down"):
            name = f"ledger/{direction}_bytes_total"
            pl_module.log(name, float(self.total(direction)), on_step=False, on_epoch=True, batch_size=1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files."""
        folder = self.folder or trainer.log_dir
        if folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        _write(path / "ledger.csv", Line._fields, self.lines)
        entries = ((i, *entry) for i, layout in enumerate(self.layouts) for entry in layout)
        _write(path / "ledger_layouts.csv", ("layout", "name", "shape", "dtype", "bytes"), entries)
        (path / "ledger.md").write_text(self.table())

    def total(self, direction: Direction) -> int:
        """Bytes that crossed in one direction."""
        return sum(line.bytes for line in self.lines if line.direction == direction)

    def run_metrics(self) -> dict[str, float]:
        """Bytes per round and per message, for the tables of ``fl-lightning reproduce``."""
        rounds = len({line.round for line in self.lines})
        found: dict[str, float] = {}
        for direction in ("up", "down"):
            messages = sum(line.direction == direction for line in self.lines)
            found[f"{direction}_bytes_per_round"] = self.total(direction) / max(rounds, 1)
            found[f"{direction}_bytes_per_client"] = self.total(direction) / max(messages, 1)
        return found

    def table(self) -> str:
        """The totals in Markdown."""
        rounds = len({line.round for line in self.lines})
        lines = ["| direction | rounds | messages | bytes | bytes per round | bytes per message |", "|---" * 6 + "|"]
        per = self.run_metrics()
        for way in ("up", "down"):
            messages = sum(line.direction == way for line in self.lines)
            each = f"{per[f'{way}_bytes_per_round']:.0f} | {per[f'{way}_bytes_per_client']:.0f}"
            lines.append(f"| {way} | {rounds} | {messages} | {self.total(way)} | {each} |")
        return "\n".join(lines) + "\n"

    def state_dict(self) -> dict[str, Any]:
        """All lines, for a run that is resumed."""
        return {
            "lines": [list(line) for line in self.lines],
            "layouts": [[list(e) for e in layout] for layout in self.layouts],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.lines = [Line(*line) for line in state_dict["lines"]]
        self.layouts = [tuple((n, s, d, b) for n, s, d, b in layout) for layout in state_dict["layouts"]]

    def _note(self, trainer: Trainer, module: Any, client: int, direction: Direction, message: State) -> None:
        self._check(module, client, message)
        layout = tuple(
            (n, "x".join(map(str, v.shape)) or "scalar", str(v.dtype).removeprefix("torch."), nbytes({n: v}))
            for n, v in message.items()
        )
        if layout not in self.layouts:
            self.layouts.append(layout)
        size = sum(entry[3] for entry in layout)
        number = self.layouts.index(layout)
        self.lines.append(Line(trainer.current_epoch, client, direction, number, size, module.completed_stages))

    def _check(self, module: Any, client: int, message: State) -> None:
        if not self.assert_private:
            return
        private = set(module.private_names) | set(module.snapshots[client].private)
        leaked = sorted(private.intersection(message))
        if leaked:
            raise FederationError(
                f"A message of client {client} carries {', '.join(leaked)}, which {type(module).__name__} says stays "
                "with the client: mend leave or message_down, or set assert_private=False."
            )


def _write(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
