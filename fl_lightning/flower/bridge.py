"""The bridges' endpoints: the transport of the training process, and the worker of a site."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fl_lightning.errors import FederationError
from fl_lightning.flower.sockets import Door, hang_up, receive, send

log = logging.getLogger(__name__)

#: Seconds that present() waits for Flower, and seconds after which the app is submitted again.
PATIENCE, AGAIN = 120.0, 60.0
#: Seconds between two checks while waiting.
LOOK = 1.0
#: Seconds that Flower keeps a message beyond its time limit, so that a late reply can be reported.
LATE = 600.0


class GridTransport:
    """Forwards messages to the nodes of a Flower federation, and their replies back.

    Args:
        socket: Path of the socket that the ServerApp connects to.
        submit: Makes Flower start the ServerApp; called again whenever it has ended.
        patience: Seconds that ``present`` waits for Flower.
        check: Called every second while waiting; it may raise to stop waiting.
    """

    def __init__(
        self,
        socket: Path,
        submit: Callable[[], None],
        patience: float = PATIENCE,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.patience, self._check = patience, check
        self._submit = submit
        self._door = Door(socket)
        self._changed = threading.Condition()
        self._connection: Connection[Any, Any] | None = None
        self._names: dict[int, str] = {}
        self._ready = False
        self._number = int(time.time() * 1000)  # different from numbers of an earlier process
        self._waiting: dict[int, tuple[str, Connection[Any, Any]]] = {}
        self._arrived: dict[int, bytes | str] = {}
        self._late: dict[int, tuple[str, float]] = {}
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._accept, self._supervise)]
        for thread in self._threads:
            thread.start()

    def present(self) -> list[str]:
        """Return the names of the nodes that are online; none if Flower does not answer in time."""
        with self._changed:
            if not self._await(lambda: self._ready or self._closed.is_set(), self.patience):
                log.warning("Flower has not answered for %.0f s.", self.patience)
            return sorted(self._names.values())

    def post(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes | str]]:
        """Send a request to each node and yield the replies as they arrive, or an error message for a failed node.

        Args:
            requests: Bytes by name of node.
            seconds: Time limit for replies; later ones are dropped with a warning.
        """
        until = time.monotonic() + seconds
        numbers: dict[int, str] = {}
        for name, payload in requests.items():
            number, sentence = self._send(name, payload, seconds)
            if sentence:
                yield name, sentence
            else:
                numbers[number] = name
        try:
            while numbers:
                with self._changed:
                    self._await(lambda: any(n in self._arrived for n in numbers), until - time.monotonic())
                    came = {number: self._arrived.pop(number) for number in [*self._arrived] if number in numbers}
                for number, reply in came.items():
                    yield numbers.pop(number), reply
                if not came:
                    break
        finally:  # the time is up, or the caller stopped iterating
            with self._changed:
                for number, name in numbers.items():
                    self._arrived.pop(number, None)
                    if self._waiting.pop(number, None) is not None:
                        self._late[number] = name, time.monotonic()
        yield from ((name, f"{name} did not answer within {seconds:g} s.") for name in numbers.values())

    def close(self) -> None:
        """End the ServerApp and close the socket."""
        self._closed.set()
        with self._changed:
            if self._connection is not None:
                hang_up(self._connection)
            self._changed.notify_all()
        self._threads[0].join()
        self._door.close()

    def _await(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, up to a time limit; the caller holds the lock."""
        until = time.monotonic() + seconds
        while not self._changed.wait_for(true, min(max(until - time.monotonic(), 0.0), LOOK)):
            if time.monotonic() >= until:
                return False
            self._check()
        return True

    def _send(self, name: str, payload: bytes, seconds: float) -> tuple[int, str]:
        """Send one request; return its number, or an error message."""
        with self._changed:
            node = next((node for node, known in self._names.items() if known == name), None)
            connection = self._connection
            if connection is None:
                return 0, f"{name} was not asked: the superlink does not answer."
            if node is None:
                return 0, f"{name} is not online."
            self._number += 1
            number = self._number
            self._waiting[number] = name, connection
        try:
            with self._sending:
                send(connection, "ask", payload, number=number, node=str(node), ttl=seconds + LATE)
        except (OSError, ValueError):
            self._drop(connection)
        return number, ""

    def _accept(self) -> None:
        """Accept connections of ServerApps; the newest replaces earlier ones."""
        while not self._closed.is_set():
            connection = self._door.accept(0.2)
            if connection is None:
                continue
            with self._changed:
                earlier, self._connection = self._connection, connection
            if earlier is not None:
                hang_up(earlier)
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection[Any, Any]) -> None:
        """Receive messages of a ServerApp until it disconnects."""
        with connection:
            while True:
                try:
                    header, payload = receive(connection)
                except (EOFError, OSError, ValueError, KeyError):
                    self._drop(connection)
                    return
                with self._changed:
                    self._take(header, payload, connection is self._connection)
                    self._changed.notify_all()

    def _take(self, header: dict[str, Any], payload: bytes, newest: bool) -> None:
        """Store a message of a ServerApp."""
        if header["kind"] == "nodes":
            if newest:
                self._names = _names({int(node): str(name) for node, name in header["nodes"].items()})
                self._ready = True
            return
        number = int(header["number"])
        if number in self._waiting:
            name, _ = self._waiting.pop(number)
            failed = header["kind"] == "failed"
            self._arrived[number] = f"{name} did not answer: {header['reason']}." if failed else payload
        elif number in self._late:
            late, since = self._late.pop(number)
            if header["kind"] == "reply":
                seconds = time.monotonic() - since
                log.warning("%s answered %.1f s after the time limit; its reply is dropped.", late, seconds)

    def _drop(self, connection: Connection[Any, Any]) -> None:
        """Fail the pending requests of a lost connection."""
        with self._changed:
            if self._connection is connection:
                self._connection, self._ready, self._names = None, False, {}
            for number, (name, asked) in list(self._waiting.items()):
                if asked is connection:
                    del self._waiting[number]
                    self._arrived[number] = f"{name} did not answer: the connection to the superlink was lost."
            self._changed.notify_all()

    def _supervise(self) -> None:
        """Submit the ServerApp whenever none is connected."""
        said = ""
        while not self._closed.is_set():
            with self._changed:
                there = self._connection is not None
            if there:
                said = ""
                self._closed.wait(0.5)
                continue
            try:
                self._submit()
            except FederationError as error:
                if str(error) != said:
                    log.warning("%s Trying again.", error)
                said = str(error)
                self._closed.wait(2.0)
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._connection is not None or self._closed.is_set(), AGAIN)


class Worker:
    """Answers messages one after the other in the calling thread.

    Args:
        socket: Path of the socket that ClientApps connect to.
        answer: Returns the reply to a request. The server receives the text of a FederationError that it raises; of any
            other exception it learns only that one occurred.
    """

    def __init__(self, socket: Path, answer: Callable[[bytes], bytes]) -> None:
        self._door, self._answer = Door(socket), answer
        self._stopped = threading.Event()

    def serve(self) -> None:
        """Answer messages until ``stop``."""
        try:
            while not self._stopped.is_set():
                connection = self._door.accept(0.2)
                if connection is not None:
                    with connection:
                        self._one(connection)
        finally:
            self._door.close()

    def stop(self) -> None:
        """Make ``serve`` return after the current message."""
        self._stopped.set()

    def _one(self, connection: Connection[Any, Any]) -> None:
        """Answer one ClientApp."""
        try:
            _, request = receive(connection)
        except (EOFError, OSError, ValueError, KeyError):
            return
        reason, reply = "", b""
        try:
            reply = self._answer(request)
        except FederationError as error:
            reason = str(error).rstrip(".")
        except Exception:
            log.exception("This site could not answer a message; the server does not learn the reason.")
            reason = "its worker failed; the site's own log says why"
        try:
            if reason:
                send(connection, "failed", reason=reason)
            else:
                send(connection, "reply", reply)
        except OSError:
            log.warning("A ClientApp ended before it received its reply.")


def _names(given: Mapping[int, str]) -> dict[int, str]:
    """Return the nodes' registered names, or their numbers if a name is missing or not unique."""
    counts: dict[str, int] = {}
    for name in given.values():
        counts[name] = counts.get(name, 0) + 1
    return {node: name if name and counts[name] == 1 else str(node) for node, name in given.items()}
