"""Errors that say what to do next.

Invariant: whoever raises knows the remedy, the command line only prints it. The remedy travels as a note (PEP 678), so
that the exception keeps its type and message. Read `kvbaton.errors` next.
"""

from __future__ import annotations

from kvbaton.errors import DeploymentError, UsageError


def usage_error(message: str, remedy: str) -> UsageError:
    """A mistake the user can mend before anything starts."""
    error = UsageError(message)
    error.add_note(remedy)
    return error


def deployment_error(message: str, remedy: str) -> DeploymentError:
    """Something did not start, or died."""
    error = DeploymentError(message)
    error.add_note(remedy)
    return error
