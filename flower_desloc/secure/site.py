"""A site's end of a sum: five questions of a server that it does not trust.

What it must not forget is on its disk before it answers: a server that kills or confuses a site
learns no more. Every refusal is a ``ValueError`` with a sentence.
"""

import json
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from flower_desloc.secure import masks, shares
from flower_desloc.secure.agreement import (
    KEY,
    About,
    Keys,
    hashed,
    least_threshold,
    session_of,
    to_confirm,
)
from flower_desloc.secure.codes import Codes
from flower_desloc.secure.identity import Identity

OF_SEED, OF_KEY = b"s", b"k"
"""What a share is of: of the seed of a site in the sum, or of the mask key of one that is not."""

_NONCE = bytes(12)  # every key of a channel encrypts one message
_LOST = (
    "this site has no keys for that sum: it has given up its shares already, or begun another; "
    "a window is asked for again with new keys"
)


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """The sum in progress; bytes are hex digits, as in its file."""

    about: str
    phase: str
    seed: str
    mask: str
    channel: str
    keys: dict[str, str]
    """Of every site; at first its own alone."""
    held: dict[str, str] = field(default_factory=dict)
    """The shares of every site that has sent some: of its seed, then of its mask key."""
    survivors: list[str] = field(default_factory=list)


class SiteSum:
    """One site's part in the sums of one run.

    Args:
        identity: The site's key and its peers'.
        path: The file of the sum in progress and of the lists that were confirmed.

    """

    def __init__(self, identity: Identity, path: Path) -> None:
        self._identity, self._path = identity, path
        self._now: _Sum | None = None
        self._given: dict[str, list[str]] = {}  # by the start of a window: who is in its sum
        self._begun: dict[str, list[str]] = {}  # by stream, the averages that it was sent
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._given, self._begun = stored["given"], stored["begun"]
            self._now = _Sum(**stored["now"]) if stored["now"] else None

    @property
    def name(self) -> str:
        """The site's name."""
        return self._identity.name

    def keys(self, about: About) -> bytes:
        """Return new keys for a sum, signed (``Keys.to_bytes``); those of the last are dropped."""
        least = self._identity.least
        if about.threshold < least:
            raise ValueError(
                f"a sum of {about.threshold} sites might be asked for, and secure-min={least} at "
                f"{self.name!r}; set federation.min_clients={least}, or more"
            )
        seed, mask, channel = (secrets.token_bytes(KEY) for _ in range(3))
        public = masks.public_of(mask), masks.public_of(channel), hashed("seed", seed)
        own = Keys(*public, signature=b"")
        own = replace(own, signature=self._identity.sign(own.signed(about, self.name)))
        self._save(
            _Sum(
                about=about.to_json(),
                phase="keys",
                seed=seed.hex(),
                mask=mask.hex(),
                channel=channel.hex(),
                keys={self.name: own.to_bytes().hex()},
            )
        )
        return own.to_bytes()

    def shares(self, keys: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return for each other site shares of this one's secrets, encrypted for it.

        ``keys`` are those of all sites of the sum.
        """
        now, about = self._at("keys")
        if keys.get(self.name) != bytes.fromhex(now.keys[self.name]):
            raise ValueError(f"the keys that the server has for {self.name!r} are not its own")
        if about.threshold < least_threshold(len(keys)) or len(keys) < about.threshold:
            raise ValueError(
                f"a threshold of {about.threshold} for {len(keys)} sites: it must be at least "
                f"{least_threshold(len(keys))}, and at most their number"
            )
        if len(keys) > about.most:
            raise ValueError(f"{len(keys)} sites in a sum whose codes are for {about.most}")
        for name, data in keys.items():
            each = Keys.of(data)
            self._identity.require_signed(name, each.signature, each.signed(about, name))
        now = replace(now, phase="shares", keys={name: data.hex() for name, data in keys.items()})
        names = sorted(keys)
        seeds, of_keys = (
            shares.split(bytes.fromhex(secret), about.threshold, len(names))
            for secret in (now.seed, now.mask)
        )
        parts = {n: s + k for n, s, k in zip(names, seeds, of_keys, strict=True)}
        now.held[self.name] = parts.pop(self.name).hex()
        self._save(now)
        return {name: self._channel(now, self.name, name)[0](part) for name, part in parts.items()}

    def receive(self, sealed: Mapping[str, bytes], averages: Mapping[str, str]) -> About:
        """Take the other sites' shares, before the local steps; return what the sum is of.

        ``averages`` are those that came with them, as in ``About.averages``.
        """
        now, about = self._at("shares", "received")
        self._require_same_averages(about, averages)
        if unknown := sealed.keys() - now.keys.keys() | sealed.keys() & {self.name}:
            raise ValueError(f"shares from {sorted(unknown)}, who are not the others of the sum")
        held = {self.name: now.held[self.name]}
        for name, data in sealed.items():
            try:
                part = self._channel(now, name, self.name)[1](data)
            except InvalidTag:
                raise ValueError(
                    f"the shares of {name!r} were changed on the way, or belong to another sum"
                ) from None
            if len(part) != 2 * KEY:
                raise ValueError(f"{name!r} has sent no shares, but {len(part)} bytes")
            held[name] = part.hex()
        self._require_enough(held, about, "have sent shares")
        self._save(replace(now, phase="received", held=held))
        return about

    def mask(self, arrays: Iterable[Codes]) -> None:
        """Add this site's masks to its codes, in place; once, as no mask may hide two values.

        The arrays and their order are the same at all sites (``masks.add_masks``).
        """
        now, _ = self._at("received")
        self._save(replace(now, phase="masked"))
        session, keys = self._session(now)
        used = [(masks.seed_key(bytes.fromhex(now.seed), session), 1)]
        for name in sorted(now.held.keys() - {self.name}):
            private = bytes.fromhex(now.mask)
            key = masks.pair_key(private, keys[name].mask, session, self.name, name)
            used.append((key, masks.sign(self.name, name)))
        masks.add_masks(arrays, used)

    def confirm(self, survivors: Collection[str]) -> bytes:
        """Return a signature of who is in the sum; one list, once for each sum."""
        now, about = self._at("masked", "confirmed")
        chosen = sorted(survivors)
        if now.survivors not in ([], chosen):
            raise ValueError(
                f"the server says that {chosen} are in the sum of {about.window}, and has said "
                f"{now.survivors}: two lists could give away a single site"
            )
        if self.name not in chosen:
            raise ValueError(
                f"the server says that {self.name!r} is not in the sum, which has sent its part"
            )
        if unknown := set(chosen) - now.held.keys():
            raise ValueError(f"{sorted(unknown)} are to be in the sum, but have sent no shares")
        self._require_enough(chosen, about, "are in the sum")
        before = self._given.get(str(about.start), chosen)
        if before != chosen:
            raise ValueError(
                f"the sum of {about.window} over {before} was given away already: one over "
                f"{chosen} would tell the difference, which is that of single sites; repeat it "
                "with the same sites"
            )
        self._save(replace(now, phase="confirmed", survivors=chosen))
        return self._identity.sign(self._to_confirm(now, chosen))

    def unmask(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return what the server may know of each site: a share of its seed, or of its mask key.

        Of those in the sum it is the first, of the others the second; then all is forgotten, so
        that nobody ever has both. ``signatures`` are those of the sites that confirmed the list.
        """
        now, about = self._at("confirmed")
        for name, signature in signatures.items():
            self._identity.require_signed(name, signature, self._to_confirm(now, now.survivors))
        confirmed = set(signatures) & set(now.survivors)
        self._require_enough(confirmed, about, "have confirmed who is in the sum")
        self._given[str(about.start)] = now.survivors
        self._save(None)
        held = {name: bytes.fromhex(part) for name, part in now.held.items()}
        return {
            name: OF_SEED + part[:KEY] if name in now.survivors else OF_KEY + part[KEY:]
            for name, part in held.items()
        }

    def forget(self) -> None:
        """Delete the file, when the run is over."""
        self._path.unlink(missing_ok=True)

    # Within

    def _at(self, *phases: str) -> tuple[_Sum, About]:
        if self._now is None:
            raise ValueError(_LOST)
        if self._now.phase not in phases:
            raise ValueError(
                f"the server asks {self.name!r} out of turn: it is at {self._now.phase!r}, and the "
                f"question is for {' or '.join(map(repr, phases))}"
            )
        return self._now, About.of_json(self._now.about)

    def _session(self, now: _Sum) -> tuple[bytes, dict[str, Keys]]:
        keys = {name: Keys.of(bytes.fromhex(data)) for name, data in now.keys.items()}
        return session_of(About.of_json(now.about), keys), keys

    def _require_same_averages(self, about: About, sent: Mapping[str, str]) -> None:
        """Raise ``ValueError`` if this site does not begin from the averages that all agreed on."""
        for name, average in about.averages.items():
            begun = self._begun.setdefault(name, [])
            if sent.get(name) == average and average not in begun:
                begun.append(average)
            if average not in begun or sent.get(name, average) != average:
                raise ValueError(
                    f"this site does not begin from the average of {name!r} that all sites of the "
                    "sum agreed on; if its state was restored or moved, delete it"
                )
        if unknown := sent.keys() - about.averages.keys():
            raise ValueError(f"averages of {sorted(unknown)}, which the sites did not agree on")

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

    def _require_enough(self, names: Collection[str], about: About, what: str) -> None:
        if len(names) < about.threshold:
            raise ValueError(
                f"only {len(names)} sites {what}, and the sum of {about.window} needs "
                f"{about.threshold}"
            )

    def _save(self, now: _Sum | None) -> None:
        """Write the sum in progress; it is on the disk when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        now_ = asdict(now) if now else None
        stored = {"given": self._given, "begun": self._begun, "now": now_}
        temporary = self._path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  # of a handle
            json.dump(stored, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._now = now
