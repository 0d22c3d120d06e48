"""Failures, by what they end, and the words in which they are reported.

- A configuration that cannot be used: ``ValueError``, before the first window.
- A client: its part in the window. On the server any ``ValueError`` about its reply, which the
  round loop records; ``ClientError`` where the policy is to stop.
- A window that stays below the quorum: ``WindowError``.
- Training that has diverged: ``DivergedError``, raised by the client or the server that sees it.
"""

REASON = 2000
"""Characters of an error, or of why a reply is left out; the rest is cut off."""

DIVERGED = 201
"""Code of the error with which a client replies that its training has diverged."""


class FederationError(RuntimeError):
    """The run cannot continue; the message names the client, the window and the setting."""


class ClientError(FederationError):
    """A client cannot take part or its reply cannot be used, and the policy is to stop."""


class WindowError(FederationError):
    """A window stayed below the quorum."""


class DivergedError(FederationError, FloatingPointError):
    """Training has diverged: values of a stream are not finite, though no batch is the cause."""


def printable(text: str) -> str:
    """Replace control characters, so that a client's text cannot act on a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str) -> str:
    """Return ``text``, cut off after ``REASON`` characters."""
    return text if len(text) <= REASON else f"{text[:REASON]} ... ({len(text)} characters)"


def reason_of(error: Exception) -> str:
    """Return the text of an error that a client's reply has led to, for logs and records."""
    return shortened(printable(str(error)))
