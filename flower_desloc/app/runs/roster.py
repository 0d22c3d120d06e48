"""Who may take part in a run: ``members.jsonl`` in its folder, which its operator adds to.

A line is a change of one site's state; the last one counts, and all of them stay. A run reads the
file before each window, so that a change takes effect while it goes on.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from flower_desloc.app.runs.folder import RunFolder
from flower_desloc.flower.json_lines import append
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.rounds import RoundHook

State = Literal["invited", "active", "paused", "ejected"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class RosterEntry:
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
        self.path = path
        self._sites: dict[str, RosterEntry] = {}
        self._nodes: dict[int, str] = {}
        self._is_closed = False
        self._read = 0  # bytes of the file

    @property
    def sites(self) -> Mapping[str, RosterEntry]:
        """The sites that have come or were invited; raises ``ValueError`` for a damaged file."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size > self._read:
            with self.path.open("rb") as file:
                file.seek(self._read)
                for text in file:
                    if text.endswith(b"\n"):
                        self._take(text)
                        self._read += len(text)
        return self._sites

    def name_of(self, node: int) -> str | None:
        """Return the name that a node has had first: it stays so under any other."""
        return self._nodes.get(node) if self.sites else None

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
        if self.path.exists() and not (written := self.path.read_bytes()).endswith(b"\n"):
            # A line that a killed process has begun never counted.
            os.truncate(self.path, written.rfind(b"\n") + 1)
        append(self.path, line)

    def _take(self, text: bytes) -> None:
        try:
            fields = json.loads(text)
            name, site = fields.pop("site"), RosterEntry(**fields)
            if site.state not in STATES:
                raise ValueError(f"state must be one of {', '.join(STATES)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path}: {text!r} is not a line of it: {error}") from error
        self._sites[name] = site
        if site.node is not None:
            self._nodes.setdefault(site.node, name)
        self._is_closed = self._is_closed or site.state == "invited"


class Governed(RoundHook):
    """Round hook that lets a site take part as the roster says, and notes those that come.

    A site that was paused or ejected stays so under another name, as its SuperNode's key shows.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def refusal(self, client: str | None, node_id: int) -> str:
        """Return why a site may not take part in the next window; empty: it may."""
        sites = self._roster.sites  # asked of every client and often: read once
        for name in (client, self._roster.name_of(node_id)):
            if name and name in sites and sites[name].state in ("paused", "ejected"):
                return _says(name, sites[name])
        if client is not None and client not in sites and self._roster.is_closed:
            return "it was not invited: `desloc members RUN invite NAME`"
        return ""

    def joined(self, client: str, node_id: int) -> None:
        """Note a site that has come, and its node."""
        known = self._roster.sites.get(client)
        if known is None or known.state == "invited" or known.node != node_id:
            self._roster.set(client, "active", node=node_id)

    def window(self, record: WindowRecord) -> None:
        """Note sites that were invited again after the run had known them."""
        sites = self._roster.sites
        for client in record.clients:
            if client in sites and sites[client].state == "invited":
                self._roster.set(client, "active")


def inherit(folder: RunFolder, name: str) -> None:
    """Begin with the list of the last run of that name, if only invited sites may join it.

    A run that is started once more gets the folder NAME-2, and the same sites.
    """
    number = re.fullmatch(rf"{re.escape(name)}-(\d+)", folder.path.name)
    if number is None or folder.members.exists():
        return
    for before in range(int(number[1]) - 1, 0, -1):
        other = folder.path.with_name(f"{name}-{before}" if before > 1 else name)
        if Roster(RunFolder(other).members).is_closed:
            shutil.copy(RunFolder(other).members, folder.members)
        if other.exists():
            return


def _says(name: str, site: RosterEntry) -> str:
    because = f": {site.reason}" if site.reason else ""
    return f"{name} was {site.state} by the operator{because}"
