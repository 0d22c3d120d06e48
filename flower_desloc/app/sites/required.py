"""What a site's node config says: the settings that it requires of every run, and no misspelt key.

A site can require what it carries out itself. What the server does with a run, such as its periods,
weights or secure sums, its settings only state.
"""

import difflib
from collections.abc import Sequence

from flower_desloc.app.config import Config, dump
from flower_desloc.app.config.overrides import split
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.runs.record import yaml_mapping
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.flower.protection import ACCEPT_APP, OF_THE_APP

REQUIRE = "require"
"""Key of the node config: words as ``KEY=VALUE``, like overrides on a command line."""
_AT_THE_SITE = (
    *("task", "task_options", "model", "data", "optimizer", "lr_schedule"),
    *("privacy.epsilon", "privacy.delta", "privacy.max_grad_norm"),
)
"""The settings, and sections of them, that a site carries out."""
PROTECTING = (*OF_THE_APP, ACCEPT_APP, "secure-keys", "secure-min")
"""The keys of a node config that protect the site. Other apps have keys of their own there."""


def check_keys(node: NodeConfig, protecting: Sequence[str] = PROTECTING) -> None:
    """Raise ``SiteRefusedError`` for a key like one of ``protecting``, which protects nothing."""
    for key in node.keys() - {*protecting}:
        plain = "epsilon" if key == "eps" else key.lower().replace("_", "-")
        if near := difflib.get_close_matches(plain, protecting, 1, 0.86):
            raise SiteRefusedError(
                f"{key} in the node config is no key of a site; {near[0]} is one"
            )


def require_settings(config: Config, node: NodeConfig) -> None:
    """Raise ``SiteRefusedError`` for a run with other settings than ``require`` states."""
    if REQUIRE not in node:
        return
    stated = str(node[REQUIRE])
    have = flat(yaml_mapping(dump(config)))
    if not (words := split(stated)):
        raise SiteRefusedError(f'{REQUIRE}="" in the node config: name settings, or leave it out')
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in have:
            raise SiteRefusedError(
                f'{REQUIRE}="{stated}" in the node config: {word} is not a setting with its value, '
                "such as task=causal_lm"
            )
        if not any(key == of or key.startswith(f"{of}.") for of in _AT_THE_SITE):
            hint = "; secure-keys lets a site send nothing plain" if "secure" in key else ""
            raise SiteRefusedError(
                f"{REQUIRE} in the node config: {key} is carried out by the server, which a site "
                f"cannot check{hint}; it can require {', '.join(_AT_THE_SITE)}"
            )
        wanted = yaml_mapping(f"value: {value}")["value"] if value else ""
        if have[key] != wanted:
            raise SiteRefusedError(
                f"this site requires {word}, and the run has {key}={have[key]} ({REQUIRE} in its "
                "node config)"
            )
