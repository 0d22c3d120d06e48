"""What a person does at a site.

FOLDER NAME: make the site's key, and print its line for the peers' files.
forget RECORD RUN FIRST LAST: let it forget that it gave these steps of a run, so that it may give
them again with other sites; the server may then learn the difference of the two sums.
"""

import sys
from pathlib import Path

from flower_desloc.secure.identity import create


def main(arguments: list[str]) -> int:
    """Do what the arguments say; return an exit status."""
    match arguments:
        case [folder, name]:
            print(create(Path(folder), name))
            return 0
        case ["forget", record, run, first, last] if first.isdecimal() and last.isdecimal():
            return _forget(Path(record), run, int(first), int(last))
    print(f"usage: python -m flower_desloc.secure ...\n\n{__doc__}", file=sys.stderr)
    return 2


def _forget(record: Path, run: str, first: int, last: int) -> int:
    # With PyTorch, which takes long.
    from flower_desloc.secure.given import Steps, given_file
    from flower_desloc.secure.site import forget_given

    try:
        if not given_file(record).is_file():
            raise ValueError(f"{given_file(record)}: there is no such file")
        if not (found := forget_given(record, Steps(run, first, last))):
            raise ValueError(f"it gave no sum within the steps {first} to {last} of run {run!r}")
    except ValueError as error:
        print("; ".join([str(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    print(*(f"forgot {each}" for each in found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
