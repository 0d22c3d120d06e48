"""The server's end of a sum: it passes messages on, adds, and removes what is left of the masks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import combinations, islice

from flower_desloc.secure import masks, shares
from flower_desloc.secure.agreement import KEY, NEW, Keys, SumTerms, hashed, session_of
from flower_desloc.secure.codes import Codes
from flower_desloc.secure.site import OF_KEY, OF_SEED

_TRIES = 1000
"""Choices of shares to be tried for one secret."""


class HiddenSumError(ValueError):
    """The sum stays hidden: fewer sites than the threshold are left, or a share is false."""


class ServerSum:
    """The sum of one window: add what the sites answer, phase by phase.

    A site that does not answer in a phase has dropped out. Each phase is closed by reading what the
    next one sends, which raises ``HiddenSumError`` below the threshold. What a site sends is a
    ``ValueError`` if it cannot be used.
    """

    def __init__(self, terms: SumTerms) -> None:
        self.terms = terms
        self._keys: dict[str, Keys] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._sum: list[Codes] = []
        self._in_sum: list[str] = []
        self._signatures: dict[str, bytes] = {}
        self._shares: dict[str, dict[int, bytes]] = {}
        self.unmasking: set[str] = set()
        """The sites that have given shares."""
        self.false: set[str] = set()
        """Those of them of which one was false, once there is a total."""

    def add_keys(self, name: str, data: bytes) -> None:
        """Add a site's ``SiteSum.keys``."""
        keys = Keys.of(data)
        masks.require_keys(name, keys)
        if self.terms.fresh and keys.history != NEW:
            raise ValueError("it does not begin from the averages alone")
        self._keys[name] = keys

    @property
    def keys(self) -> dict[str, bytes]:
        """The keys of all sites, for ``SiteSum.shares``."""
        self._require(self._keys, "have sent keys")
        return {name: keys.to_bytes() for name, keys in sorted(self._keys.items())}

    @property
    def is_alike(self) -> bool:
        """Whether the sites have taken the same windows; otherwise all have to begin afresh."""
        return len({keys.history for keys in self._keys.values()}) == 1

    def add_shares(self, name: str, sealed: Mapping[str, bytes]) -> None:
        """Add a site's ``SiteSum.shares``."""
        if sealed.keys() != self._keys.keys() - {name}:
            raise ValueError(f"it sent shares for {sorted(sealed)}, expected all other sites")
        self._sealed[name] = dict(sealed)

    @property
    def sharing(self) -> list[str]:
        """The sites that have sent shares; the others take no part."""
        self._require(self._sealed, "have sent shares")
        return sorted(self._sealed)

    def sealed_for(self, name: str) -> dict[str, bytes]:
        """Return the shares for a site, for its ``SiteSum.receive``."""
        return {other: self._sealed[other][name] for other in self.sharing if other != name}

    def add_masked(self, name: str, arrays: Iterable[Codes]) -> None:
        """Add a site's masked codes: arrays of the same lengths and order as others'."""
        if not self._in_sum:
            self._sum = [codes.copy() for codes in arrays]
        else:
            for total, codes in zip(self._sum, arrays, strict=True):
                total += codes  # wraps around, modulo 2^64
        self._in_sum.append(name)

    @property
    def survivors(self) -> list[str]:
        """The sites in the sum, for ``SiteSum.confirm``."""
        self._require(self._in_sum, "are in the sum")
        return sorted(self._in_sum)

    def add_signature(self, name: str, signature: bytes) -> None:
        """Add a site's ``SiteSum.confirm``."""
        self._signatures[name] = signature

    @property
    def signatures(self) -> dict[str, bytes]:
        """The signatures of the list of survivors, for ``SiteSum.unmask``."""
        self._require(self._signatures, "have confirmed who is in the sum")
        return dict(sorted(self._signatures.items()))

    def add_unmasking(self, name: str, given: Mapping[str, bytes]) -> None:
        """Add a site's ``SiteSum.unmask``."""
        kinds = {other: OF_SEED if other in self._in_sum else OF_KEY for other in self._sealed}
        if given.keys() != kinds.keys() or any(
            len(given[other]) != 1 + KEY or given[other][:1] != kind
            for other, kind in kinds.items()
        ):
            raise ValueError("it sent other shares than those that were asked for")
        place = sorted(self._keys).index(name)
        for other, share in given.items():
            self._shares.setdefault(other, {})[place] = share[1:]
        self.unmasking.add(name)

    def total(self) -> list[Codes]:
        """Return the sum of the survivors' codes, in the order of their arrays."""
        self._require(self.unmasking, "have given shares")
        session = session_of(self.terms, self._keys)
        used: list[tuple[bytes, int]] = []
        for name in self.sharing:
            secret = self._secret(name)
            if name in self._in_sum:
                used.append((masks.seed_key(secret, session), -1))
                continue
            for other in self._in_sum:  # what it shares with those in the sum has not cancelled
                key = masks.pair_key(secret, self._keys[other].mask, session, name, other)
                used.append((key, -masks.sign(other, name)))
        masks.add_masks(self._sum, used)
        return self._sum

    def _secret(self, name: str) -> bytes:
        """Return a site's secret; of spare shares false ones are left out, and named."""
        given, least, names = self._shares[name], self.terms.threshold, sorted(self._keys)
        # Those of sites that have given false ones are tried last.
        of_all = sorted(given, key=lambda place: (names[place] in self.false, place))
        for places in islice(_choices(of_all, least), _TRIES):
            secret = shares.join({place: given[place] for place in places}, least)
            if self._is_secret(name, secret):
                break
        else:
            raise HiddenSumError(
                f"the shares do not give the secret of {name!r}: a site has sent a false one"
            )
        spare = [place for place in of_all if place not in places]
        # They are fewer than the threshold: one by one, which is slow, only if some are false.
        at_once = {place: given[place] for place in [*places, *spare][-least:]}
        if spare and shares.join(at_once, least) != secret:
            for place in spare:
                others = {other: given[other] for other in places[1:]}
                if shares.join({**others, place: given[place]}, least) != secret:
                    self.false.add(names[place])
        return secret

    def _is_secret(self, name: str, secret: bytes) -> bool:
        keys = self._keys[name]
        if name in self._in_sum:
            return keys.commitment == hashed("seed", secret)
        return masks.public_of(secret) == keys.mask

    def _require(self, names: Sized, what: str) -> None:
        number = len(names)
        if number < self.terms.threshold:
            raise HiddenSumError(
                f"only {number} sites {what}, and the sum of {self.terms.window} needs "
                f"{self.terms.threshold}"
            )


def _choices(places: Sequence[int], number: int) -> Iterator[list[int]]:
    """Yield choices of so many places, those without few of the first ones before all others."""
    for spare in range(len(places) - number + 1):
        first = places[: number + spare]
        for left_out in combinations(first, spare):
            yield [place for place in first if place not in left_out]
