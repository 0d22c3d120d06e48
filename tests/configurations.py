"""Configurations that differ from another in some settings."""

from dataclasses import replace
from typing import Any


def with_values(config: Any, values: dict[str, Any]) -> Any:
    """Return a configuration with the values of dotted keys, without any check."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        new = with_values(getattr(config, name), {rest: value}) if rest else value
        config = replace(config, **{name: new})
    return config
