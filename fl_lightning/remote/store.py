"""Private state of a site on its own disk: one version per round, written atomically."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from fl_lightning.checkpoints import replace
from fl_lightning.errors import FederationError
from fl_lightning.remote.envelope import seal, unseal
from fl_lightning.snapshots import ClientSnapshot

#: Number of versions kept before the server's current one, for a server that resumes an earlier checkpoint.
KEPT = 8
#: Size in bytes of the random part of a version's name, and of the checksum at the end of its file.
RANDOM, CHECKSUM = 8, 32
_VERSION = re.compile(rf"\d+-[0-9a-f]{{{2 * RANDOM}}}")


def is_version(name: str) -> bool:
    """Return whether a text is the name of a version.

    Example:
        >>> is_version("3-0123456789abcdef"), is_version("../3-0123456789abcdef")
        (True, False)
    """
    return _VERSION.fullmatch(name) is not None


class PrivateStore:
    """Versions of a client's private entries in a folder that only the site's user can read.

    The name of a version consists of the number of rounds that the client has trained and a random number, which
    reveals nothing about the contents. A damaged or replaced file is rejected.

    Args:
        folder: the folder; created if necessary.
        kept: number of versions kept before the server's current one.
    """

    def __init__(self, folder: str | Path, kept: int = KEPT) -> None:
        self.folder, self.kept = Path(folder), kept
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FederationError(
                f"The client's private state cannot be written to {self.folder} ({error.strerror}): name another "
                "folder."
            ) from error

    def save(self, number: int, snapshot: ClientSnapshot) -> str:
        """Store a new version and return its name, once it is on the disk."""
        counters = [snapshot.rounds, snapshot.steps, snapshot.last_round]
        version = f"{snapshot.rounds}-{secrets.token_hex(RANDOM)}"
        header = {"number": number, "version": version, "counters": counters}
        data = seal(header, {"private": snapshot.private})
        data += hashlib.sha256(data).digest()
        try:
            replace(self._path(number, version), data)
        except OSError as error:
            raise FederationError(
                f"The client's private state cannot be written to {self.folder} ({error.strerror}): free some space."
            ) from error
        return version

    def load(self, number: int, version: str) -> ClientSnapshot:
        """Load the version that the server refers to."""
        if not is_version(version):
            raise FederationError(f"{version!r} is not a version of a client's private state.")
        path = self._path(number, version)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FederationError(
                f"The server refers to version {version} of client {number}'s private state, which is not in "
                f"{self.folder}: bring back the folder from a backup, or start a run of another name."
            ) from error
        if hashlib.sha256(data[:-CHECKSUM]).digest() != data[-CHECKSUM:]:
            raise FederationError(f"{path} was damaged: bring it back from a backup.")
        header, parts = unseal(data[:-CHECKSUM])
        if (header["number"], header["version"]) != (number, version):
            raise FederationError(f"{path} holds another version, {header['version']}: bring it back from a backup.")
        return ClientSnapshot(parts["private"], *header["counters"])

    def prune(self, number: int, oldest: int) -> None:
        """Remove versions of a number that are too old to be needed again.

        Args:
            number: the number.
            oldest: rounds of the oldest version that the server refers to.
        """
        for path in self.folder.glob(f"{number}.*.safetensors"):
            version = path.name.split(".")[1]
            if int(version.split("-")[0]) < oldest - self.kept:
                path.unlink(missing_ok=True)

    def versions(self, number: int) -> list[str]:
        """Return all versions of a number, oldest first."""
        found = (path.name.split(".")[1] for path in self.folder.glob(f"{number}.*.safetensors"))
        return sorted(found, key=lambda version: int(version.split("-")[0]))

    def _path(self, number: int, version: str) -> Path:
        return self.folder / f"{number}.{version}.safetensors"
