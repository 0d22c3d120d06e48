"""Make a site's key, and print its line for the peers' files: FOLDER NAME."""

import sys
from pathlib import Path

from flower_desloc.secure.identity import create


def main(arguments: list[str]) -> int:
    """Print the line of a site; return an exit status."""
    if len(arguments) != 2:
        print(f"usage: python -m flower_desloc.secure FOLDER NAME\n\n{__doc__}", file=sys.stderr)
        return 2
    print(create(Path(arguments[0]), arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
