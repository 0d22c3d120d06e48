"""Settings as Flower reads them from one argument: ``partition-id=0 data-path="/data/text"``."""

from collections.abc import Mapping


def as_argument(settings: Mapping[str, str | int | float]) -> str:
    """Return the value of `--run-config`, `--federation-config` or `--node-config`."""
    return " ".join(f"{key}={_toml(value)}" for key, value in settings.items())


def _toml(value: str | int | float) -> str:
    if not isinstance(value, str):
        return str(value)
    # Flower looks for the next quotation mark to find the end of a value, so none may stand
    # inside, not even escaped; TOML knows it by its number as well.
    special = {'"': "\\u0022", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(special.get(char, char) for char in value) + '"'
