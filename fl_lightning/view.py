"""Progress display of all commands: a live line on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console

#: Seconds between two plain lines, and between two states of a notebook's line.
EVERY, NOTEBOOK = 10.0, 0.25


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    Example:
        >>> duration(75), duration(3725.4)
        ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class View:
    """Progress of a long task and its remaining time.

    On a terminal it is one live line with a bar, in a notebook one live line; elsewhere a plain line every ten seconds,
    and one at the end.

    Args:
        what: the unit counted, such as ``round``.
        total: total number of units; None if unknown.
        begin: number of units done before, by a run that is resumed.
        quiet: whether to show nothing.
        console: the console to print to; None means standard output.
        every: seconds between two plain lines; a notebook's line changes four times a second.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        begin: float = 0,
        quiet: bool = False,
        console: Console | None = None,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.begin, self.quiet = what, total, begin, quiet
        self.console = console or Console()
        self._every, self._clock = NOTEBOOK if self.console.is_jupyter else every, clock
        self._started = self._printed = clock()
        self._done, self._facts = float(begin), ""
        self._bar: Any = None
        self._shown = ""
        self._cell: Any = None
        if not quiet and self.console.is_terminal:
            self._bar = self._open()

    def _open(self) -> Any:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[facts]}"))
        bar = Progress(*columns, console=self.console, refresh_per_second=4, transient=False)
        self._task = bar.add_task(self._head(), total=self.total, facts="")
        bar.update(self._task, completed=self.begin)
        bar.start()
        return bar

    def update(self, done: float, *facts: str) -> None:
        """Set the number of completed units, possibly fractional, and further facts to show."""
        self._done = done
        self._facts = "  ".join(filter(None, [*facts, self._left()]))
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=self._head(), facts=self._facts)
        elif not self.quiet and self._clock() - self._printed >= self._every:
            self._line()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the display; the last line stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif not self.quiet:
            self._line()
        self.quiet = True

    def _line(self) -> None:
        self._printed = self._clock()
        text = f"{self._head()}  {self._facts}".rstrip()
        if text != self._shown:
            self._shown = text
            if self.console.is_jupyter:
                self._change(text)
            else:
                self.console.print(text, highlight=False, soft_wrap=True)

    def _change(self, text: str) -> None:
        """Redraw the line in the notebook."""
        from IPython.display import display

        shown = {"text/plain": text}
        if self._cell is None:
            self._cell = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._cell.update(shown, raw=True)

    def _head(self) -> str:
        return f"{self.what} {int(self._done)}" + (f"/{self.total}" if self.total else "")

    def _left(self) -> str:
        fresh, spent = self._done - self.begin, self._clock() - self._started
        if not self.total or fresh <= 0:
            return ""
        if self._done >= self.total:
            return f"in {duration(spent)}"
        return f"{duration(spent / fresh * (self.total - self._done))} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
