"""Failures, by what they end, and the words in which they are reported.

- A configuration that cannot be used ends the run before its first window: ``ValueError``.
- A failed client ends its part in the window. The round loop records the ``ValueError`` about its
  reply, and raises ``ClientError`` where the policy is to stop, or ``EveryClientError`` if all
  clients have the cause.
- A window that stays below the quorum ends the run: ``WindowError``.
- Training that has diverged ends the run: ``DivergedError``, raised by the client or the server
  that sees it.
"""

from dataclasses import dataclass
from typing import Final

from flower_desloc.core.errors import NotFiniteError, SetupError

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


class DivergedError(FederationError):
    """Training has diverged: values of a stream are not finite, though no batch is the cause."""


@dataclass(frozen=True)
class ErrorType:
    """An error whose type a client replies as a code; of others Flower sends the text alone."""

    code: int
    raised: type[Exception]
    """At the client."""
    read: type[ValueError]
    """From its reply, by the server."""
    failure: type[FederationError]
    """What ends the run if the client's error is to end it."""


_TYPES: Final = (
    ErrorType(201, DivergedError, NotFiniteError, DivergedError),
    ErrorType(202, SetupError, SetupError, EveryClientError),
)


def code_of(error: Exception) -> int | None:
    """Return the code with which a client replies an error; None if it has none."""
    return next((each.code for each in _TYPES if isinstance(error, each.raised)), None)


def with_text(error: Exception, text: str) -> Exception:
    """Return an error of the same type, as far as that is replied, with another text."""
    kinds = (each.raised for each in _TYPES if isinstance(error, each.raised))
    return next(kinds, RuntimeError)(text)


def client_error(code: int, reason: str | None) -> ValueError:
    """Return the error that a client has replied."""
    kind = next((each.read for each in _TYPES if each.code == code), ValueError)
    return kind(reason or "no reason given")


def failure_of(error: ValueError) -> type[FederationError]:
    """Return what ends the run if a client's error is to end it."""
    return next((each.failure for each in _TYPES if isinstance(error, each.read)), ClientError)


def printable(text: str) -> str:
    """Replace control characters, so that a client's text cannot act on a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str) -> str:
    """Return ``text``, cut off after ``REASON`` characters."""
    return text if len(text) <= REASON else f"{text[:REASON]} ... ({len(text)} characters)"


def reason_of(error: Exception) -> str:
    """Return the text of an error that a client's reply has led to, for logs and records."""
    return shortened(printable(str(error)))
