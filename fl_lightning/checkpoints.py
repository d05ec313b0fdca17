"""Checkpoint files: written atomically, with a checksum that is verified before they are read.

A checkpoint is a zip archive written by ``torch.save``. The archive's comment, at the very end of the file, is the
SHA-256 of all bytes before it; ``torch.load`` and zip programs ignore it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn

from fl_lightning.errors import FederationError
from fl_lightning.process import wanted

#: Signatures of the first and last record of a zip archive; the last one ends with the length of the comment.
ZIP, END, END_SIZE = b"PK\x03\x04", b"PK\x05\x06", 22
#: The comment: this mark, then the checksum in hexadecimal.
MARK = b"fl_lightning sha256 "
COMMENT = len(MARK) + 2 * hashlib.sha256().digest_size
#: Number of bytes read at once.
CHUNK = 1 << 20
#: Entries that a run needs to resume, besides the model.
NEEDED = {"optimizer_states": list, "lr_schedulers": list, "loops": dict, "callbacks": dict}
#: Entries of every Trainer checkpoint, and types of the common ones.
ALWAYS = {"state_dict": dict, "pytorch-lightning_version": str}
USUAL = {**ALWAYS, **NEEDED, "epoch": int, "global_step": int}
#: Errors of rebuilding a method: its class is another one, or it has lost an option since.
_OTHER_CLASS = re.compile(r"The class '[\w.]*?(\w+)' requested by the checkpoint does not resolve")
_LOST_OPTION = re.compile(r"^ *- (\w+ has no option '\w+')", re.MULTILINE)


class DamagedError(FederationError):
    """A checkpoint file was changed after it was written."""


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint IO, except that local files get a checksum and are replaced atomically."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write to a temporary file, flush, and rename."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        seal(buffer)
        replace(Path(path), buffer.getbuffer())


class CheckedCheckpointIO(_WrappingCheckpointIO):
    """Wraps a checkpoint plugin and turns its failures into clear errors.

    A fit that would resume from a damaged file resumes from the newest intact one in its folder, with a warning.

    Args:
        checkpoint_io: the wrapped plugin.
        trainer: the Trainer that uses it; None treats a fit like an evaluation.
    """

    def __init__(self, checkpoint_io: Any = None, trainer: Trainer | None = None) -> None:
        super().__init__(checkpoint_io)
        self.trainer = trainer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, *args: Any, **kwargs: Any) -> None:
        """Save with the wrapped plugin."""
        try:
            super().save_checkpoint(checkpoint, path, *args, **kwargs)
        except OSError as error:
            raise FederationError(
                f"The checkpoint {path} cannot be written ({error.strerror or error}): make room or let "
                "ModelCheckpoint write to another folder; checkpoints that were written before are intact."
            ) from error

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load with the wrapped plugin."""
        resumes = self.trainer is not None and self.trainer.state.fn == "fit"
        try:
            return self._load(path, resumes, *args, **kwargs)
        except DamagedError as damage:
            for other in others(path) if resumes else ():
                with suppress(FederationError):
                    found = self._load(other, resumes, *args, **kwargs)
                    rank_zero_warn(f"{damage} The run resumes from {other}, the newest intact one in its folder.")
                    return found
            raise

    def _load(self, path: _PATH, resumes: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with readable(path):
            found = super().load_checkpoint(path, *args, **kwargs)
            check_content(path, found, resumes)
            return found


def watch(trainer: Trainer) -> None:
    """Make the Trainer's strategy use the classes above."""
    strategy = trainer.strategy
    given = strategy.checkpoint_io
    if isinstance(given, CheckedCheckpointIO) or not wanted("checkpoints"):
        return
    plain = type(given) is TorchCheckpointIO
    strategy.checkpoint_io = CheckedCheckpointIO(SafeCheckpointIO() if plain else given, trainer)


def seal(archive: io.BytesIO) -> None:
    """Add the checksum to an archive just written by ``torch.save``, as its comment."""
    archive.seek(-2, os.SEEK_END)
    archive.write(COMMENT.to_bytes(2, "little"))
    archive.write(MARK + hashlib.sha256(archive.getbuffer()).hexdigest().encode())


def check(path: Path) -> None:
    """Reject a file that was changed; one without a checksum must at least be complete."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = _last(file, size, COMMENT)
        if tail.startswith(MARK):
            if _checksum(file, size - len(tail)).encode() != tail[len(MARK) :]:
                raise _damaged(path, "its checksum differs")
            return
        file.seek(0)
        whole = _last(file, size, END_SIZE).startswith(END) and tail.endswith(b"\0\0")
        if file.seek(0) == 0 and file.read(len(ZIP)) == ZIP and not whole:
            raise _damaged(path, "its end is missing or changed")


def _last(file: io.BufferedReader, size: int, count: int) -> bytes:
    file.seek(max(size - count, 0))
    return file.read(count)


def _checksum(file: io.BufferedReader, size: int) -> str:
    digest, left = hashlib.sha256(), size
    file.seek(0)
    while left:
        part = file.read(min(left, CHUNK))
        digest.update(part)
        left -= len(part)
    return digest.hexdigest()


def replace(path: Path, content: bytes | memoryview) -> None:
    """Replace a file atomically: write to a temporary file in the same folder, sync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _remove_left(path: Path) -> None:
    """Remove temporary files of killed processes of this machine."""
    for partial in path.parent.glob(f".{path.name}.{socket.gethostname()}.*.part"):
        process = partial.suffixes[-2].removeprefix(".")
        if process.isdecimal() and int(process) != os.getpid() and not _is_running(int(process)):
            partial.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Sync a folder, so that the rename is on the disk, if the system supports it."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def others(path: _PATH) -> Iterable[Path]:
    """Return the other checkpoints in a checkpoint's folder, newest first."""
    found = [other for other in Path(path).parent.glob("*.ckpt") if other.name != Path(path).name and other.is_file()]
    return sorted(found, key=lambda other: other.stat().st_mtime_ns, reverse=True)


def check_content(path: _PATH, checkpoint: Any, resumes: bool) -> None:
    """Reject objects that are not Trainer checkpoints, and for a fit, those that cannot be resumed."""
    if not isinstance(checkpoint, dict) or not ALWAYS.keys() <= checkpoint.keys():
        raise FederationError(f"{path} is not a checkpoint of a Trainer: it has no model that the Trainer saved.")
    missing = [name for name in NEEDED if name not in checkpoint]
    for name, kind in USUAL.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            found = type(checkpoint[name]).__name__
            raise FederationError(
                f"{path} was changed, or is of something else: its {name} is of type {found}, not {kind.__name__}; use "
                "one that was not changed."
            )
    if resumes and not missing and "fit_loop" not in checkpoint["loops"]:
        raise FederationError(f"No run can resume from {path}, which has no progress of a fit: use another.")
    if resumes and missing:
        raise FederationError(
            f"No run can resume from {path}, which contains only a model (no {', '.join(missing)}), as written by "
            "save_weights_only: evaluate it, use load_from_checkpoint, or resume from another."
        )


@contextmanager
def readable(path: Any, method: str = "method") -> Iterator[None]:
    """Verify a file before it is read, and turn exceptions of reading it into clear errors."""
    try:
        if isinstance(path, str | os.PathLike) and _is_local_file_protocol(path):  # type: ignore[arg-type]
            check(Path(path))
        yield
    except FederationError as error:
        if "needs a network: " not in str(error):
            raise
        raise FederationError(
            f"The checkpoint {path} cannot rebuild its net, which is not a FedNet: "
            f"pass the net again: {method}.load_from_checkpoint(path, net=...)."
        ) from error
    except FileNotFoundError as error:
        raise FederationError(f"There is no checkpoint {path}.") from error
    except IsADirectoryError as error:
        raise FederationError(
            f"{path} is a folder: give a checkpoint, such as runs/.../checkpoints/last.ckpt."
        ) from error
    except PermissionError as error:
        raise FederationError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error
    except Exception as error:
        if (other := _OTHER_CLASS.match(str(error))) and other[1] != method:
            raise FederationError(f"The checkpoint {path} is of {other[1]}, not of {method}.") from error
        if lost := _LOST_OPTION.search(str(error)):
            raise FederationError(
                f"The checkpoint {path} is of another version of the library ({lost[1]}): load it with that version."
            ) from error
        raise _damaged(path, type(error).__name__) from error


def _damaged(path: Any, reason: str) -> DamagedError:
    return DamagedError(
        f"The checkpoint {path} cannot be read, it is damaged or not a checkpoint ({reason}): use an earlier one."
    )
