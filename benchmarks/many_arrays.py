"""Time of a window with many small arrays in a deployment, in bundles and one by one.

    python benchmarks/many_arrays.py [--megabytes 50] [--arrays 100 400] [--turns 3] [--json FILE]

A stream of ``--arrays`` arrays is sent from the server to one client and back, over TLS through a
SuperLink and a SuperNode on this machine, with the app of `large_payload.py`. The two variants take
turns, one run each; a ratio is the median over the turns.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from aggregation import about
from large_payload import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--arrays", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    result: dict[str, Any] = {
        **about(),
        "megabytes": args.megabytes,
        "seconds": {},
    }
    for arrays in args.arrays:
        values = int(args.megabytes * 1e6 / 4 / arrays)
        seconds: dict[str, list[float]] = {"in bundles": [], "one by one": []}
        for _ in range(args.turns):
            for how, times in seconds.items():
                found = measure("deployment", values, arrays, bundles=how == "in bundles")
                times.append(found["seconds"]["total"])
        pairs = zip(seconds["in bundles"], seconds["one by one"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        result["seconds"][arrays] = {**seconds, "ratio": ratio}
        each = ", ".join(f"{how} {statistics.median(t):.1f} s" for how, t in seconds.items())
        print(f"{arrays} arrays: {each}, {ratio:.2f} times", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
