"""Check of the extra that deployment needs."""

from __future__ import annotations

from importlib.util import find_spec

from fl_lightning.errors import FederationError


def needed(package: str = "flwr") -> None:
    """Raise an error with the command to install a missing package.

    Example:
        >>> needed("json")
        >>> needed("no_such_package")
        Traceback (most recent call last):
        ...
        fl_lightning.errors.FederationError: A federation needs no_such_package: pip install 'fl-lightning[deploy]'.
    """
    if find_spec(package) is None:
        raise FederationError(f"A federation needs {package}: pip install 'fl-lightning[deploy]'.")
