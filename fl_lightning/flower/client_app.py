"""Flower's ClientApp, one process per message: forwards bytes to the site's worker, and its reply back."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp

from fl_lightning.flower.payload import packed, unpacked
from fl_lightning.flower.sockets import connect, receive, send

#: Seconds to wait for the worker, which may be restarting.
PATIENCE = 20.0
#: Flower's error code for failures reported by a ClientApp.
FAILED = 2


def answer(message: Message, context: Context) -> Message:
    """Return the worker's reply to a message, or an error."""
    try:
        connection = connect(Path(str(context.node_config["socket"])), PATIENCE)
    except (ConnectionError, KeyError):
        return _failed(message, "its worker is not running")
    try:
        send(connection, "ask", unpacked(message.content))
        header, payload = receive(connection)
    except (EOFError, OSError):
        return _failed(message, "its worker ended while working on the request")
    finally:
        connection.close()
    if header["kind"] == "failed":
        return _failed(message, str(header["reason"]))
    content: RecordDict = packed(payload)
    return Message(content, reply_to=message)


def _failed(message: Message, reason: str) -> Message:
    """Return an error with a reason."""
    return Message(Error(FAILED, reason), reply_to=message)


app = ClientApp()
for kind in (MessageType.TRAIN, MessageType.EVALUATE, MessageType.QUERY):
    getattr(app, kind)()(answer)
