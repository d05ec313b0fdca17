"""Flower's ServerApp: forwards bytes of the training process to sites, and their replies back."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fl_lightning.flower.payload import packed, unpacked
from fl_lightning.flower.sockets import connect, receive, send

#: Seconds to wait for the training process.
PATIENCE = 20.0
#: Seconds between polls for replies, and between polls for online nodes.
REPLIES, NODES = 0.2, 1.0
#: Reasons for some of Flower's error codes, whose own texts are long.
REASONS = {5: "it is offline", 8: "its ClientApp ended"}


class Bridge:
    """Pending requests between a training process and Flower's grid.

    Args:
        grid: Flower's grid.
        connection: Connection to the training process.
    """

    def __init__(self, grid: Any, connection: Connection[Any, Any]) -> None:
        self.grid, self.connection = grid, connection
        self.asked: dict[str, tuple[int, int, str]] = {}  # by Flower's message ID: our number, node, its activation
        self.online: dict[int, tuple[str, str]] = {}  # by node: name, time of activation
        self.told: dict[int, tuple[str, str]] | None = None
        self.looked = self.heard = 0.0

    def serve(self) -> None:
        """Forward messages until the training process disconnects."""
        try:
            while True:
                self.look()
                # Polls for replies load the superlink, so poll less often if sites take long.
                quiet = (time.monotonic() - self.heard) / 10
                if self.connection.poll(min(max(quiet, REPLIES), NODES) if self.asked else NODES):
                    self.ask()
                self.collect()
        except (EOFError, OSError):
            return

    def look(self) -> None:
        """Report changes of the online nodes; fail requests to nodes that restarted."""
        if time.monotonic() - self.looked < NODES:
            return
        self.online = {
            int(node.node_id): (str(node.name), str(node.last_activated_at)) for node in self.grid.get_nodes()
        }
        self.looked = time.monotonic()
        if self.online != self.told:
            send(self.connection, "nodes", nodes={str(node): name for node, (name, _) in self.online.items()})
            self.told = self.online
        for message, (number, node, since) in list(self.asked.items()):
            if node in self.online and self.online[node][1] != since:
                self.failed(message, number, "it was restarted while working on the request")

    def ask(self) -> None:
        """Forward one request of the training process."""
        header, payload = receive(self.connection)
        self.heard = time.monotonic()
        number, node = int(header["number"]), int(header["node"])
        message = Message(packed(payload), dst_node_id=node, message_type=MessageType.TRAIN, ttl=float(header["ttl"]))
        (pushed,) = list(self.grid.push_messages([message])) or [None]
        if pushed is None:
            send(self.connection, "failed", number=number, reason="Flower did not take the message")
        else:
            self.asked[str(pushed)] = number, node, self.online.get(node, ("", ""))[1]

    def collect(self) -> None:
        """Forward the replies that have arrived."""
        for reply in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            self.heard = time.monotonic()
            message = str(reply.metadata.reply_to_message_id)
            if message not in self.asked:
                continue
            number, node, _ = self.asked[message]
            if reply.has_error():
                self.looked = 0.0  # poll at once, so that an offline node is known before the message fails
                self.look()
                if message in self.asked:
                    self.failed(
                        message, number, REASONS.get(int(reply.error.code), str(reply.error.reason).rstrip("."))
                    )
            elif int(reply.metadata.src_node_id) != node:
                self.failed(message, number, "another node answered in its name")
            else:
                del self.asked[message]
                send(self.connection, "reply", unpacked(reply.content), number=number)

    def failed(self, message: str, number: int, reason: str) -> None:
        """Report a failed request."""
        del self.asked[message]
        send(self.connection, "failed", number=number, reason=reason)


def main(grid: Grid, context: Context) -> None:
    """Forward messages between the training process and the grid."""
    connection = connect(Path(str(context.run_config["socket"])), PATIENCE)
    try:
        Bridge(grid, connection).serve()
    finally:
        connection.close()


app = ServerApp()
app.main()(main)
