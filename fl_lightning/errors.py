"""The one exception that the library raises on purpose."""

from __future__ import annotations


class FederationError(ValueError):
    """Something the user can put right: a setting, a file, a net that does not fit the data.

    The message is one sentence that says what is wrong and what to do. The command line prints it without a
    traceback and ends with exit code 2.
    """
