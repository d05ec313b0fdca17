"""Flower's ClientApp, a process for every message: passes bytes to the site's worker, and its answer back."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp

from fl_lightning.flower.payload import packed, unpacked
from fl_lightning.flower.sockets import connect, receive, send

#: Seconds to wait for the worker, which may be starting again.
PATIENCE = 20.0
#: Flower's number of an error that a ClientApp reports.
FAILED = 2


def answer(message: Message, context: Context) -> Message:
    """The worker's answer to a message, or an error with its sentence."""
    try:
        connection = connect(Path(str(context.node_config["socket"])), PATIENCE)
    except (ConnectionError, KeyError):
        return _failed(message, "its worker does not run")
    try:
        send(connection, "ask", unpacked(message.content))
        header, payload = receive(connection)
    except (EOFError, OSError):
        return _failed(message, "its worker ended while it worked")
    finally:
        connection.close()
    if header["kind"] == "failed":
        return _failed(message, str(header["reason"]))
    content: RecordDict = packed(payload)
    return Message(content, reply_to=message)


def _failed(message: Message, reason: str) -> Message:
    """An error with its sentence."""
    return Message(Error(FAILED, reason), reply_to=message)


app = ClientApp()
for kind in (MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY):
    getattr(app, kind)()(answer)
