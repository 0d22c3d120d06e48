"""What a site has given away: a line of a file for each sum that it has helped to unmask.

The file is only appended to, and a line is on the disk before the site gives. It belongs to no run.
A line may also say that a person lets the site forget some that are before it.
"""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.secure.agreement import digest_in

FORGET = "python -m flower_desloc.secure forget"
"""The command by which a person lets a site forget sums."""

_GIVEN, _FORGOTTEN = "given", "forgotten"
"""What a line has, under one of these."""


@dataclass(frozen=True)
class Steps:
    """Steps of a run, the ``first`` to the ``last``."""

    run: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class GivenSum:
    """A sum that the site has helped to unmask."""

    run: str
    start: int
    stop: int
    params: str
    """The parameters that it began from, as in ``SumTerms.averages``; empty if it has none."""
    averages: str
    """Digest of the values of all that it began from; their versions are what the server says."""
    members: list[str]

    def overlaps(self, other: "GivenSum") -> bool:
        """Return whether the sums of both, over other sites, tell something of single ones.

        They do if they began from the same parameters, whatever streams are due: all follow from
        the same gradients. In one run these may be the same at a later window, where none were due;
        something else has another average then.
        """
        same_run = self.run == other.run
        if same_run and self.start < other.stop and other.start < self.stop:
            return True
        if self.averages == other.averages:
            return True
        were_not_due = same_run and self.params == other.params
        return digest_in(self.params) == digest_in(other.params) != "" and not were_not_due

    def is_of(self, steps: Steps) -> bool:
        """Return whether it is of these steps, and of no others."""
        return self.run == steps.run and steps.first <= self.start + 1 and self.stop <= steps.last

    def __str__(self) -> str:
        return f"the sum of steps {self.start + 1} to {self.stop} of {self.run} over {self.members}"

    def to_forget(self, record: Path) -> str:
        """Return the command that lets the site forget it."""
        steps = str(self.start + 1), str(self.stop)
        return f"{FORGET} {shlex.join([str(record.absolute()), self.run, *steps])}"


class GivenSums:
    """The given sums of the site whose ``record`` this is (``given_file``), for one process."""

    def __init__(self, record: Path) -> None:
        self._record, self._path = record, given_file(record)
        self._end = 0
        self._sums: list[GivenSum] = []

    def read(self, least: int) -> list[GivenSum]:
        """Return the sums; raises ``SiteRefusedError`` for a file that has lost some.

        It must have ``least`` bytes. What follows its last whole line was never acted on.
        """
        data = self._path.read_bytes() if self._path.exists() else b""
        self._end = data.rfind(b"\n") + 1
        try:
            if self._end < least:
                raise ValueError(f"{self._end} bytes, and {least} were written")
            self._sums = []
            for line in data[: self._end].splitlines():
                self._count(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise SiteRefusedError(
                "the record of what this site gave away in secure sums, "
                f"secure/{self._path.name} in its state-dir, is damaged or incomplete; restore it, "
                f"or delete it and secure/{self._record.name}: then the server may learn the "
                "difference of two sums, which is that of single sites",
                f"{self._path}: {error}",
            ) from error
        return self._sums

    def add(self, given: GivenSum) -> int:
        """Add a sum to those that were read; return the bytes of the file, on the disk."""
        if given not in self._sums:
            self._append({_GIVEN: asdict(given)})
        else:  # by a process that may have been killed before the line was on the disk
            with self._path.open("ab") as file:
                os.fsync(file.fileno())
        return self._end

    def forget(self, steps: Steps) -> list[GivenSum]:
        """Forget those of the sums that were read that are of these steps; return them."""
        found = [each for each in self._sums if each.is_of(steps)]
        if found:
            self._append({_FORGOTTEN: asdict(steps)})
        return found

    def _count(self, line: Mapping[str, Any]) -> None:
        ((what, fields),) = line.items()
        if what == _GIVEN:
            self._sums.append(GivenSum(**fields))
        elif what == _FORGOTTEN:
            steps = Steps(**fields)
            self._sums = [each for each in self._sums if not each.is_of(steps)]
        else:
            raise ValueError(f"it has {what!r}")

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        self._path.touch(mode=0o600)
        with self._path.open("ab") as file:
            file.truncate(self._end)  # what a killed process has begun to write
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(data)
        self._count(line)


def given_file(record: Path) -> Path:
    """Return the path of a site's file of given sums, which is beside its ``record``."""
    return record.with_suffix(".given.jsonl")
