"""The settings that a site requires of every run."""

from flower_desloc.app.config import Config, dump
from flower_desloc.app.config.overrides import split
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.runs.record import yaml_mapping
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig

REQUIRE = "require"
"""Key of the node config: words as ``KEY=VALUE``, like overrides on a command line."""


def require_settings(config: Config, node: NodeConfig) -> None:
    """Raise ``ValueError`` for a run with other settings than the site's ``require`` states."""
    if REQUIRE not in node:
        return
    stated = str(node[REQUIRE])
    have = flat(yaml_mapping(dump(config)))
    if not (words := split(stated)):
        raise ValueError(f'{REQUIRE}="" in the node config: name settings, or leave it out')
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in have:
            raise ValueError(
                f'{REQUIRE}="{stated}" in the node config: {word} is not a setting with its value, '
                "such as task=causal_lm"
            )
        wanted = yaml_mapping(f"value: {value}")["value"] if value else ""
        if have[key] != wanted:
            raise ValueError(
                f"this site requires {word}, and the run has {key}={have[key]} ({REQUIRE} in its "
                "node config)"
            )
