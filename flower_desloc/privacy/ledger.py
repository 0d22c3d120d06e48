"""A site's ledger: the queries of its data that were answered, and the secret of its noise.

``SITE.jsonl`` has one line a step. A line is on the disk before its step can leave a process, also
where the one that wrote it was killed. The file is only appended to, and belongs to no run:
deleting it forgets what was spent. ``SITE.secret`` holds 32 random bytes. Lines written under
another secret stay spent; with them no noise repeats.
"""

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.privacy.accounting import Step


class Lines:
    """The lines of a ledger's file.

    Raises ``ValueError`` for a file that is damaged elsewhere than at its end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._answers: dict[str, str] = {}
        self._steps: Counter[tuple[str, Step]] = Counter()
        self._noise: dict[str, float] = {}
        self.read()

    def steps(self, run: str | None = None) -> Counter[Step]:
        """Return the number of answered queries by their cost, of one run or of all."""
        found: Counter[Step] = Counter()
        for (name, step), number in self._steps.items():
            if run in (None, name):
                found[step] += number
        return found

    def runs(self) -> list[str]:
        """Return the runs in the ledger, the oldest first."""
        return list(self._noise)

    def read(self) -> None:
        """Read what was written since."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._end:
            raise SiteRefusedError(
                "the privacy ledger of this site, in its state-dir, has lost lines; restore it",
                str(self._path),
            )
        if not size:
            return
        with self._path.open("rb") as file:
            file.seek(self._end)
            whole, _, _ = file.read().rpartition(b"\n")
        for line in whole.split(b"\n") if whole else ():
            self._count(line)
        self._end += len(whole) + bool(whole)

    def _count(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            run, query, answer = (str(entry[key]) for key in ("run", "query", "answer"))
            step = Step(float(entry["noise_multiplier"]), float(entry["sample_rate"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SiteRefusedError(
                "the privacy ledger of this site, in its state-dir, is damaged, so what is spent "
                "is not known; restore it from a copy",
                f"{self._path}: {line[:80]!r}",
            ) from error
        self._answers[query] = answer
        self._steps[run, step] += 1
        self._noise[run] = step.noise_multiplier


class Ledger(Lines):
    """The ledger of ``site`` in ``folder``, which is created.

    Raises ``ValueError`` for a file that is damaged elsewhere than at its end.
    """

    def __init__(self, folder: Path, site: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / f"{site}.lock")
        self._on_disk = 0
        with self._lock:  # or a line could be read that is taken back
            super().__init__(folder / f"{site}.jsonl")
            with self.locked():
                self.secret = _secret(folder / f"{site}.secret")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Read what other processes have written, put it on disk, and keep them from writing."""
        with self._lock:
            self.read()
            if self._end > self._on_disk:
                # The last is written again: where it failed once, the next fsync of the same does
                # nothing. Those before it were on disk before it was appended.
                with self._path.open("r+b") as file:
                    file.seek(self._on_disk)
                    lines = file.read(self._end - self._on_disk)
                    last = lines.rfind(b"\n", 0, -1) + 1
                    file.seek(self._on_disk + last)
                    file.write(lines[last:])
                    self._sync(file)
                self._on_disk = self._end
            yield

    def answer(self, query: str) -> str | None:
        """Return the digest of the answer that the query got; None if it got none."""
        return self._answers.get(query)

    def noise_multiplier(self, run: str) -> float | None:
        """Return the noise of the run's last step; None before the first."""
        return self._noise.get(run)

    def append(self, run: str, query: str, answer: str, step: Step) -> None:
        """Write that a query is answered; only while ``locked``.

        Returns once it is on disk; on an error takes the line back.
        """
        entry = {"run": run, "query": query, "answer": answer, **vars(step)}
        line = json.dumps(entry).encode() + b"\n"
        try:
            with self._path.open("ab") as file:
                file.truncate(self._end)  # what a killed process has begun to write
                file.write(line)
                self._sync(file)
        except BaseException:
            with suppress(OSError):  # else it is put on disk before it is read
                os.truncate(self._path, self._end)
            raise
        self._end += len(line)
        self._on_disk = self._end
        self._count(line)

    def _sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        if not self._on_disk:  # its name may not be there either
            _sync_folders(self._path)


def _secret(path: Path) -> bytes:
    """Return the site's secret, which is drawn at its first use."""
    if not path.exists():
        temporary = path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:  # noqa: PTH123  # of a handle
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_folders(path)
    secret = path.read_bytes()
    if len(secret) != 32:
        raise SiteRefusedError(
            "the secret of this site's privacy ledger, in state-dir, is damaged; delete its file",
            f"{path}: must hold 32 random bytes, has {len(secret)}",
        )
    return secret


def _sync_folders(path: Path) -> None:
    """Put the name of a file on disk, and those of its folders, which may be new."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    device = path.parent.stat().st_dev
    for folder in path.absolute().parents:
        try:
            if folder.stat().st_dev != device:
                return
            handle = os.open(folder, os.O_RDONLY)
        except PermissionError:  # of another user, so it is not new
            return
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
