"""A site's end of a sum: five questions of a server that it does not trust.

What it must not forget is on its disk before it answers: a server that kills or confuses a site
learns no more. Every refusal is a ``ValueError`` with a sentence.
"""

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from filelock import FileLock, Timeout

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.schedule import PARAMS
from flower_desloc.secure import masks, shares
from flower_desloc.secure.agreement import (
    KEY,
    NEW,
    Keys,
    SumTerms,
    digest_in,
    hashed,
    least_threshold,
    session_of,
    to_confirm,
)
from flower_desloc.secure.codes import Codes
from flower_desloc.secure.given import FORGET, GivenSum, GivenSums, Steps, given_file
from flower_desloc.secure.identity import Identity

P = ParamSpec("P")
T = TypeVar("T")

OF_SEED, OF_KEY = b"s", b"k"
"""What a share is of: of the seed of a site in the sum, or of the mask key of one that is not."""

_NONCE = bytes(12)  # every key of a channel encrypts one message
_LOST = "this site has no keys for that sum; a window is asked for again with new keys"


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """The sum in progress; bytes are hex digits, as in its file."""

    terms: str
    phase: str
    seed: str
    mask: str
    channel: str
    keys: dict[str, str]
    """Of every site; at first its own alone."""
    held: dict[str, str] = field(default_factory=dict)
    """The shares of every site that has sent some: of its seed, then of its mask key."""
    survivors: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Origin:
    """What a state is from."""

    history: str
    """As in ``Keys.history``; empty while it is not certain."""
    averages: dict[str, str]
    """Those that its last window began from, as in ``SumTerms.averages``."""


@dataclass(kw_only=True)
class _Stored:
    """What is in the file of a site."""

    given: int = 0
    """Bytes of the file of what it gave, which may have more."""
    origins: dict[str, dict[str, _Origin]] = field(default_factory=dict)
    """By run and step, the origin of the state after it."""
    now: dict[str, _Sum] = field(default_factory=dict)
    """By run, the sum in progress."""

    @classmethod
    def read(cls, path: Path) -> "_Stored":
        """Read the file, if there is one; raises ``SiteRefusedError`` for one of something else."""
        if not path.exists():
            return cls()
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                given=int(stored["given"]),
                origins={
                    run: {step: _Origin(**each) for step, each in origins.items()}
                    for run, origins in stored["origins"].items()
                },
                now={run: _Sum(**each) for run, each in stored["now"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SiteRefusedError(
                f"the record of this site's secure sums, secure/{path.name} in its state-dir, is "
                "damaged or of another version; delete it, but keep "
                f"secure/{given_file(path).name}, which has what was given away: without that the "
                "server may learn the difference of two sums, which is that of single sites",
                f"{path}: {error}",
            ) from error


def forget_given(path: Path, steps: Steps) -> list[GivenSum]:
    """Let the site whose file this is forget what it gave of some steps; return it.

    It may then give these steps again with other sites, and the server learn the difference.
    """
    with FileLock(path.with_suffix(".lock")):
        given = GivenSums(path)
        given.read(_Stored.read(path).given)
        return given.forget(steps)


def _alone(
    question: Callable[Concatenate["SiteSum", P], T],
) -> Callable[Concatenate["SiteSum", P], T]:
    """Let one process at a time answer, from what the last one has written."""

    @wraps(question)
    def answer(self: "SiteSum", /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_suffix(".lock")):
            self._stored = _Stored.read(self._path)
            return question(self, *args, **kwargs)

    return answer


class SiteSum:
    """One site's part in its sums, of all runs.

    Several processes may answer for one site: each question reads the file, and writes it before
    the answer, under one lock.

    Args:
        identity: The site's key and its peers'.
        path: The site's record of sums in progress, of all runs; the given sums are in another file
            (``given.given_file``). No message deletes them.
        run: The run's name.

    """

    def __init__(self, identity: Identity, path: Path, run: str) -> None:
        self._identity, self._path, self._run = identity, path, run
        self._stored, self._given = _Stored(), GivenSums(path)

    @property
    def name(self) -> str:
        """The site's name."""
        return self._identity.name

    @_alone
    def keys(self, terms: SumTerms, state_step: int | None) -> bytes:
        """Return new keys for a sum, signed (``Keys.to_bytes``); those of the last are dropped.

        ``state_step`` is the step of the state that this site begins from; None: from averages
        alone.
        """
        least = self._identity.least
        if terms.threshold < least:
            raise ValueError(
                f"a sum of {terms.threshold} sites might be asked for, and secure-min={least} at "
                f"{self.name!r}; set federation.min_clients={least}, or more"
            )
        if terms.most > (number := len(self._identity.peers)):
            raise ValueError(
                f"a sum of up to {terms.most} sites, and the peers' file of {self.name!r} has "
                f"{number}"
            )
        seed, mask, channel = (secrets.token_bytes(KEY) for _ in range(3))
        public = masks.public_of(mask), masks.public_of(channel), hashed("seed", seed)
        history = NEW if terms.fresh else self._history(state_step) or secrets.token_bytes(KEY)
        own = Keys(*public, history, signature=b"")
        own = replace(own, signature=self._identity.sign(own.signed(terms, self.name)))
        self._save(
            _Sum(
                terms=terms.to_json(),
                phase="keys",
                seed=seed.hex(),
                mask=mask.hex(),
                channel=channel.hex(),
                keys={self.name: own.to_bytes().hex()},
            )
        )
        return own.to_bytes()

    @_alone
    def shares(self, keys: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return for each other site shares of this one's secrets, encrypted for it.

        ``keys`` are those of all sites of the sum.
        """
        now, terms = self._at("keys")
        if keys.get(self.name) != bytes.fromhex(now.keys[self.name]):
            raise ValueError(f"the keys that the server has for {self.name!r} are not its own")
        if terms.threshold < least_threshold(len(keys)) or len(keys) < terms.threshold:
            raise ValueError(
                f"a threshold of {terms.threshold} for {len(keys)} sites: it must be at least "
                f"{least_threshold(len(keys))}, and at most their number"
            )
        if len(keys) > terms.most:
            raise ValueError(f"{len(keys)} sites in a sum whose codes are for {terms.most}")
        for name, data in keys.items():
            each = Keys.of(data)
            self._identity.require_signed(name, each.signature, each.signed(terms, name))
            masks.require_keys(name, each)
            if each.history != Keys.of(keys[self.name]).history:
                raise ValueError(
                    f"{name!r} and {self.name!r} have taken other windows since the averages: the "
                    "sum would tell their difference; the server has to let all begin from these"
                )
        now = replace(now, phase="shares", keys={name: data.hex() for name, data in keys.items()})
        names = sorted(keys)
        seeds, of_keys = (
            shares.split(bytes.fromhex(secret), terms.threshold, len(names))
            for secret in (now.seed, now.mask)
        )
        parts = {n: s + k for n, s, k in zip(names, seeds, of_keys, strict=True)}
        now.held[self.name] = parts.pop(self.name).hex()
        self._save(now)
        return {name: self._channel(now, self.name, name)[0](part) for name, part in parts.items()}

    @_alone
    def receive(
        self,
        sealed: Mapping[str, bytes],
        averages: Mapping[str, str],
        state_step: int | None,
        states: Collection[int],
    ) -> None:
        """Take the other sites' shares, before the local steps.

        ``averages`` are those that came with them, as in ``SumTerms.averages``; the caller has all
        others of the sum in its state after ``state_step``, which is as in ``keys``. ``states`` are
        the steps of all states that it has; without one it begins from averages.
        """
        now, terms = self._at("shares", "received")
        origin = self._origin(state_step)
        held = {**dict.fromkeys(terms.averages, ""), **origin.averages, **averages}
        for name, average in held.items():  # also one that the terms leave out
            if terms.averages.get(name) != average:
                raise ValueError(
                    f"the average of {name!r} is not the one that all sites of the sum agreed on"
                )
        if self._history(state_step) != Keys.of(bytes.fromhex(now.keys[self.name])).history:
            raise ValueError(
                "the state of this site is not the one that it stated to the others; a window is "
                "asked for again with new keys"
            )
        if unknown := sealed.keys() - now.keys.keys() | sealed.keys() & {self.name}:
            raise ValueError(f"shares from {sorted(unknown)}, who are not the others of the sum")
        parts = {self.name: now.held[self.name]}
        for name, data in sealed.items():
            try:
                part = self._channel(now, name, self.name)[1](data)
            except InvalidTag:
                raise ValueError(
                    f"the shares of {name!r} were changed on the way, or belong to another sum"
                ) from None
            if len(part) != 2 * KEY:
                raise ValueError(f"{name!r} has sent no shares, but {len(part)} bytes")
            parts[name] = part.hex()
        self._require_enough(parts, terms, "have sent shares")
        kept = self._stored.origins.get(self._run, {}).items()
        origins = {step: each for step, each in kept if int(step) in states}
        # The state at the end is about to be written.
        origins[str(terms.stop)] = _Origin(history="", averages=dict(terms.averages))
        self._stored.origins[self._run] = origins
        self._save(replace(now, phase="received", held=parts))

    @_alone
    def mask(self, arrays: Iterable[Codes]) -> None:
        """Add this site's masks to its codes, in place; once, as no mask may hide two values.

        The arrays and their order are the same at all sites (``masks.add_masks``).
        """
        now, terms = self._at("received")
        session, keys = self._session(now)
        history = hashed("history", keys[self.name].history, terms.steps)
        origins = self._stored.origins[self._run]
        origins[str(terms.stop)] = replace(origins[str(terms.stop)], history=history.hex())
        self._save(replace(now, phase="masked", seed="", mask="", channel=""))
        used = [(masks.seed_key(bytes.fromhex(now.seed), session), 1)]
        for name in sorted(now.held.keys() - {self.name}):
            private = bytes.fromhex(now.mask)
            key = masks.pair_key(private, keys[name].mask, session, self.name, name)
            used.append((key, masks.sign(self.name, name)))
        masks.add_masks(arrays, used)

    @_alone
    def confirm(self, survivors: Collection[str]) -> bytes:
        """Return a signature of who is in the sum; one list, once for each sum."""
        now, terms = self._at("masked", "confirmed")
        chosen = sorted({*survivors})
        if now.survivors not in ([], chosen):
            raise ValueError(
                f"the server says that {chosen} are in the sum of {terms.window}, and has said "
                f"{now.survivors}: two lists could give away a single site"
            )
        if self.name not in chosen:
            raise ValueError(
                f"the server says that {self.name!r} is not in the sum, which has sent its part"
            )
        if unknown := set(chosen) - now.held.keys():
            raise ValueError(f"{sorted(unknown)} are to be in the sum, but have sent no shares")
        self._require_enough(chosen, terms, "are in the sum")
        self._require_same_members(self._giving(terms, chosen))
        self._save(replace(now, phase="confirmed", survivors=chosen))
        return self._identity.sign(self._to_confirm(now, chosen))

    @_alone
    def unmask(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return what the server may know of each site: a share of its seed, or of its mask key.

        Of those in the sum it is the first, of the others the second; then the rest is forgotten,
        so that nobody ever has both. Asked again, it gives the same. ``signatures`` are those of
        the sites that confirmed the list; false ones do not count.
        """
        now, terms = self._at("confirmed", "given")
        if now.phase == "given":
            return {name: bytes.fromhex(part) for name, part in now.held.items()}
        what = self._to_confirm(now, now.survivors)
        confirmed = [
            name
            for name in now.survivors
            if self._identity.has_signed(name, signatures.get(name, b""), what)
        ]
        self._require_enough(confirmed, terms, "have confirmed who is in the sum")
        giving = self._giving(terms, now.survivors)
        self._require_same_members(giving)
        self._stored.given = self._given.add(giving)
        held = {name: bytes.fromhex(part) for name, part in now.held.items()}
        given = {
            name: OF_SEED + part[:KEY] if name in now.survivors else OF_KEY + part[KEY:]
            for name, part in held.items()
        }
        kept = {name: part.hex() for name, part in given.items()}
        self._save(replace(now, phase="given", held=kept))
        return given

    @_alone
    def forget(self) -> None:
        """Drop the sum in progress, when the run is over and its states here are deleted."""
        self._stored.origins.pop(self._run, None)
        self._save(None)

    @_alone
    def terms(self) -> SumTerms:
        """Return what the sum is of for which this site has sent shares."""
        return self._at("shares", "received")[1]

    @contextmanager
    def training(self, *, patience: float = 0.0) -> Iterator[None]:
        """Let one process at a time take the run's local steps and mask what comes of them.

        Another one waits for so many seconds; then it raises ``ValueError``.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._path.with_suffix(f".{self._run}.lock"), timeout=patience)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"another process of {self.name!r} is in a window of run {self._run!r}; one "
                "SuperNode at a time may answer for a site"
            ) from None
        try:
            yield
        finally:
            lock.release()

    # Within

    def _at(self, *phases: str) -> tuple[_Sum, SumTerms]:
        now = self._stored.now.get(self._run)
        if now is None:
            raise ValueError(_LOST)
        if now.phase not in phases:
            raise ValueError(
                f"the server asks {self.name!r} out of turn: it is at {now.phase!r}, and the "
                f"question is for {' or '.join(map(repr, phases))}"
            )
        return now, SumTerms.of_json(now.terms)

    def _session(self, now: _Sum) -> tuple[bytes, dict[str, Keys]]:
        keys = {name: Keys.of(bytes.fromhex(data)) for name, data in now.keys.items()}
        return session_of(SumTerms.of_json(now.terms), keys), keys

    def _history(self, state_step: int | None) -> bytes:
        """Return the history of a state; empty if it is not known."""
        return NEW if state_step is None else bytes.fromhex(self._origin(state_step).history)

    def _origin(self, state_step: int | None) -> _Origin:
        """Return what a state is from; empty if there is none, or it is not known."""
        unknown = _Origin(history="", averages={})
        return self._stored.origins.get(self._run, {}).get(str(state_step), unknown)

    def _giving(self, terms: SumTerms, members: list[str]) -> GivenSum:
        values = {name: digest_in(average) for name, average in terms.averages.items()}
        text = json.dumps(values, sort_keys=True)
        return GivenSum(
            run=terms.run,
            start=terms.start,
            stop=terms.stop,
            params=terms.averages.get(PARAMS, ""),
            averages=hashed("averages", text.encode()).hex(),
            members=members,
        )

    def _require_same_members(self, giving: GivenSum) -> None:
        """Raise ``SiteRefusedError`` if another sum and this one would tell the difference."""
        told = [
            each
            for each in self._given.read(self._stored.given)
            if each.overlaps(giving) and each.members != giving.members
        ]
        if told:
            raise SiteRefusedError(
                f"a sum of steps {giving.start + 1} to {giving.stop}, or from the same parameters, "
                f"was given away already over other sites: one over {giving.members} would tell "
                "the difference, which is that of single sites; repeat it with the same sites, or "
                "begin from other averages. Only a person at this site who accepts that may let it "
                f"forget the other sum, by `{FORGET}` as in its log",
                "\n".join(f"{each}: {each.to_forget(self._path)}" for each in told),
            )

    def _to_confirm(self, now: _Sum, survivors: Collection[str]) -> bytes:
        return to_confirm(self._session(now)[0], now.held, survivors)

    def _channel(self, now: _Sum, sender: str, receiver: str) -> tuple[Any, Any]:
        """Return what encrypts and decrypts a message from one site to another."""
        session, keys = self._session(now)
        other = receiver if sender == self.name else sender
        names = sender.encode(), receiver.encode()
        private = bytes.fromhex(now.channel)
        key = masks.shared_key(private, keys[other].channel, b"channel", session, *names)
        cipher, bound = ChaCha20Poly1305(key), hashed("channel", session, *names)
        return (
            lambda data: cipher.encrypt(_NONCE, data, bound),
            lambda data: cipher.decrypt(_NONCE, data, bound),
        )

    def _require_enough(self, names: Collection[str], terms: SumTerms, what: str) -> None:
        if len(names) < terms.threshold:
            raise ValueError(
                f"only {len(names)} sites {what}, and the sum of {terms.window} needs "
                f"{terms.threshold}"
            )

    def _save(self, now: _Sum | None) -> None:
        """Write the sum in progress; it is on the disk when this returns."""
        self._stored.now.pop(self._run, None)
        if now is not None:
            self._stored.now[self._run] = now
        temporary = self._path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  # of a handle
            json.dump(asdict(self._stored), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        if os.name != "nt":  # which opens no folders
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
