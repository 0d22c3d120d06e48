"""Time of a window with many small arrays in a deployment, in bundles and one by one.

    python benchmarks/many_arrays.py [--megabytes 50] [--arrays 100,400] [--turns 3] [--json FILE]

A stream of ``--arrays`` arrays is sent from the server to one client and back, over TLS through a
SuperLink and a SuperNode on this machine, with the app of `large_payload.py`. The two variants take
turns, one run each; a ratio is the median over the turns.
"""

import statistics
from pathlib import Path
from typing import Any

import typer
from common import ratios, report
from large_payload import measure


def main(
    megabytes: float = 50, arrays: str = "100,400", turns: int = 3, json: Path | None = None
) -> None:
    """Time of a window with many small arrays in a deployment, in bundles and one by one."""
    result: dict[str, Any] = {"megabytes": megabytes, "seconds": {}}
    for number in map(int, arrays.split(",")):
        values = int(megabytes * 1e6 / 4 / number)
        seconds: dict[str, list[float]] = {"in bundles": [], "one by one": []}
        for _ in range(turns):
            for how, times in seconds.items():
                found = measure("deployment", values, number, bundles=how == "in bundles")
                times.append(found["seconds"]["total"])
        ratio = statistics.median(ratios(seconds["in bundles"], to=seconds["one by one"]))
        result["seconds"][number] = {**seconds, "ratio": ratio}
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
