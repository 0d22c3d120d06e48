"""Who may take part in a run: ``members.jsonl`` in its folder, which its operator adds to.

A line is a change of one site's state; the last one counts, and all of them stay. A run reads the
file before each window, so that a change takes effect while it goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from flower_desloc.app.runs.folder import append
from flower_desloc.flower.rounds import RoundHook

State = Literal["invited", "active", "paused", "ejected"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Site:
    """A site as the last line about it says."""

    state: State
    since: str
    """Time in UTC."""
    node: int | None = None
    """Flower's number of the SuperNode, which belongs to its key; None before it has come."""
    reason: str = ""


class Roster:
    """The sites of a run, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sites: dict[str, Site] = {}
        self._is_closed = False
        self._read = 0  # bytes of the file

    @property
    def sites(self) -> Mapping[str, Site]:
        """The sites that have come or were invited; raises ``ValueError`` for a damaged file."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size > self._read:
            with self._path.open("rb") as file:
                file.seek(self._read)
                for text in file:
                    if text.endswith(b"\n"):
                        self._take(text)
                        self._read += len(text)
        return self._sites

    @property
    def is_closed(self) -> bool:
        """Whether only sites that were invited may come: from the first invitation on."""
        return bool(self.sites) and self._is_closed

    def set(self, name: str, state: State, *, node: int | None = None, reason: str = "") -> None:
        """Add a line; without ``node`` it keeps the site's. Raises ``OSError`` if it cannot."""
        known = self.sites.get(name)
        line = {
            "site": name,
            "state": state,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "node": known.node if node is None and known else node,
            "reason": reason,
        }
        append(self._path, line)

    def _take(self, text: bytes) -> None:
        try:
            fields = json.loads(text)
            name, site = fields.pop("site"), Site(**fields)
            if site.state not in STATES:
                raise ValueError(f"state must be one of {', '.join(STATES)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._path}: {text!r} is not a line of it: {error}") from error
        self._sites[name] = site
        self._is_closed = self._is_closed or site.state == "invited"


class Governed(RoundHook):
    """Round hook that lets a site take part as the roster says, and notes those that come.

    A site that was ejected stays so under another name, as its SuperNode's key shows.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def admits(self, client: str, node_id: int) -> str:
        """Return why a site may not take part in the next window; empty: it may."""
        roster = self._roster
        sites = roster.sites
        for name, site in sites.items():
            if site.state == "ejected" and (name == client or site.node == node_id):
                return _says(name, site)
        known = sites.get(client)
        if known is None and roster.is_closed:
            return "it was not invited: `desloc members RUN invite NAME`"
        if known is not None and known.state == "paused":
            return _says(client, known)
        if known is None or known.state == "invited" or known.node != node_id:
            roster.set(client, "active", node=node_id)
        return ""


def _says(name: str, site: Site) -> str:
    because = f": {site.reason}" if site.reason else ""
    return f"{name} was {site.state} by the operator{because}"
