"""Sites and a server of secure sums in memory, without Flower."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flower_desloc.secure.agreement import (
    SHORT,
    WIDE,
    SumTerms,
    least_threshold,
    shapes_digest,
    stated,
)
from flower_desloc.secure.codes import Codes, packed, signed, unpacked
from flower_desloc.secure.identity import Identity, introduce
from flower_desloc.secure.server import ServerSum
from flower_desloc.secure.site import SiteSum

SHAPES = {"params": {"a": 5, "b": 0, "c": 3}, "exp_avg_sq": {"a": 7}}
WIDTHS = {"params": SHORT, "exp_avg_sq": WIDE}


MOST = {name: 2 ** (8 * width - 5) for name, width in WIDTHS.items()}


def terms(number: int, **changed: Any) -> SumTerms:
    """Return what a sum of so many sites is of."""
    values: dict[str, Any] = {
        "run": "run",
        "attempt": "one",
        "start": 0,
        "stop": 16,
        "threshold": least_threshold(number),
        "shapes": {
            name: shapes_digest({key: [size] for key, size in tensors.items()})
            for name, tensors in SHAPES.items()
        },
        "scales": dict.fromkeys(SHAPES, 40),
        "widths": WIDTHS,
        "most": number,
        "averages": {"params": stated(0, "0f", 0.5)},
        "fresh": False,
        "request": "1f",
    }
    return SumTerms(**{**values, **changed})


def codes(m: int) -> dict[str, dict[str, Codes]]:
    """Return the codes of site m, of both signs and up to the largest."""
    noise = np.random.default_rng(m)
    return {
        name: {key: noise.integers(-MOST[name], MOST[name], size) for key, size in tensors.items()}
        for name, tensors in SHAPES.items()
    }


class Sites:
    """Sites whose files are in a folder."""

    def __init__(self, folder: Path, number: int, *, least: int = 3) -> None:
        self.names = [f"site-{chr(97 + m)}" for m in range(number)]
        self.folder, self.least = folder, least
        introduce(folder, self.names)
        self.sites = {name: self.restarted(name) for name in self.names}

    def restarted(self, name: str, run: str = "run") -> SiteSum:
        """Return a site as another process finds it."""
        identity = Identity.read(self.folder, name, self.least)
        return SiteSum(identity, self.folder / f"{name}.json", run)

    def present(self, gone: Collection[str]) -> Iterable[tuple[str, SiteSum]]:
        """Yield the other sites."""
        return ((name, self.restarted(name)) for name in self.names if name not in gone)

    def until_masked(
        self,
        server: ServerSum,
        gone: Mapping[str, int],
        of: Callable[[int], Mapping[str, Mapping[str, Codes]]] = codes,
    ) -> None:
        """Take the first three phases; ``gone`` has by site the phase in which it is gone."""

        def at(phase: int, names: Iterable[str] = self.names) -> Iterable[tuple[str, SiteSum]]:
            left = {name for name, when in gone.items() if when <= phase}
            return self.present(left | set(self.names) - set(names))

        for name, site in at(0):
            server.add_keys(name, site.keys(server.terms, None))
        for name, site in at(1, keys := server.keys):
            server.add_shares(name, site.shares(keys))
        for name, site in at(2, server.sharing):
            site.receive(server.sealed_for(name), server.terms.averages, None, ())
            arrays = of(self.names.index(name))
            site.mask(in_order(arrays))
            server.add_masked(name, in_order(sent(arrays)))

    def unmask(self, server: ServerSum, gone: Collection[str] = ()) -> None:
        """Take the last two phases, without the sites in ``gone`` in the last."""
        for name, site in self.present(set(self.names) - set(server.survivors)):
            server.add_signature(name, site.confirm(server.survivors))
        for name, site in self.present(set(self.names) - set(server.survivors) | set(gone)):
            server.add_unmasking(name, site.unmask(server.signatures))


def sent(arrays: Mapping[str, Mapping[str, Codes]]) -> dict[str, dict[str, Codes]]:
    """Return what arrives of masked codes."""
    return {
        name: {k: unpacked(packed(c, WIDTHS[name]), WIDTHS[name]) for k, c in each.items()}
        for name, each in arrays.items()
    }


def in_order(arrays: Mapping[str, Mapping[str, Codes]]) -> list[Codes]:
    """Return the arrays in the order in which they are masked."""
    return [arrays[name][key] for name in sorted(arrays) for key in sorted(arrays[name])]


def plain(members: Iterable[int]) -> list[Codes]:
    """Return the sum of the sites' codes without masks."""
    return [sum(each) for each in zip(*(in_order(codes(m)) for m in members), strict=True)]


def same(masked: Iterable[Codes], other: Iterable[Codes]) -> bool:
    """Return whether an unmasked sum is the other, bit for bit."""
    widths = [WIDTHS[name] for name in sorted(SHAPES) for _ in SHAPES[name]]
    return all(
        np.array_equal(signed(codes.copy(), width), sum_)
        for codes, width, sum_ in zip(masked, widths, other, strict=True)
    )
