"""The exception for user errors."""

from __future__ import annotations


class FederationError(ValueError):
    """An error that the user can correct: a setting, a file, a net that does not fit the data.

    The message is one sentence that says what is wrong and what to do. The command line prints it without a
    traceback and exits with code 2.
    """
