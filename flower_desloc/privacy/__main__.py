"""Print what a site has spent: ``python -m flower_desloc.privacy LEDGER DELTA``."""

import sys
from pathlib import Path

from flower_desloc.privacy.accounting import Budget, epsilon
from flower_desloc.privacy.ledger import Lines


def main(ledger: str, delta: str) -> None:
    """Print the steps and the epsilon of every run in a ledger, and of all together."""
    path = Path(ledger)
    if not path.is_file():
        raise SystemExit(f"{path}: there is no such ledger")
    try:
        held, bound = Lines(path), Budget(1, float(delta)).delta
    except ValueError as error:
        told = [str(error), *getattr(error, "__notes__", ())]
        raise SystemExit("; ".join(told)) from error
    for run in [*held.runs(), None]:
        steps = held.steps(run)
        used = epsilon(steps, bound)
        print(f"{run or 'all runs'}: epsilon={used:.4g} delta={delta} after {steps.total()} steps")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
