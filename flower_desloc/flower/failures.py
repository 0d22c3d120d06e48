"""Failures, by what they end, and the words in which they are reported.

- A configuration that cannot be used: ``ValueError``, before the first window.
- A client: its part in the window. On the server any ``ValueError`` about its reply, which the
  round loop records; ``ClientError`` where the policy is to stop, ``EveryClientError`` if all have
  the cause.
- A window that stays below the quorum: ``WindowError``.
- Training that has diverged: ``DivergedError``, raised by the client or the server that sees it.
"""

from typing import Final

from flower_desloc.core.types import NotFiniteError, SetupError

REASON = 2000
"""Characters of an error, or of why a reply is left out; the rest is cut off."""


class FederationError(RuntimeError):
    """The run cannot continue; the message names the client, the window and the setting."""


class ClientError(FederationError):
    """A client cannot take part or its reply cannot be used, and the policy is to stop."""


class WindowError(FederationError):
    """A window stayed below the quorum."""


class EveryClientError(FederationError):
    """A client cannot take part, for a reason that all clients have: the settings, or the model."""


class DivergedError(FederationError, FloatingPointError):
    """Training has diverged: values of a stream are not finite, though no batch is the cause."""


CODES: Final = {DivergedError: 201, SetupError: 202}
"""Codes of the errors that a client replies; of other exceptions Flower sends the text alone."""
_READ: Final = {201: NotFiniteError, 202: SetupError}


def client_error(code: int, reason: str | None) -> ValueError:
    """Return the error that a client has replied."""
    return _READ.get(code, ValueError)(reason or "no reason given")


def failure_of(error: ValueError) -> type[FederationError]:
    """Return what ends the run if a client's error is to end it."""
    if isinstance(error, NotFiniteError):
        return DivergedError
    return EveryClientError if isinstance(error, SetupError) else ClientError


def printable(text: str) -> str:
    """Replace control characters, so that a client's text cannot act on a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str) -> str:
    """Return ``text``, cut off after ``REASON`` characters."""
    return text if len(text) <= REASON else f"{text[:REASON]} ... ({len(text)} characters)"


def reason_of(error: Exception) -> str:
    """Return the text of an error that a client's reply has led to, for logs and records."""
    return shortened(printable(str(error)))
