"""The configuration of a run: YAML becomes typed objects once, here.

The server loads the configuration and sends it to the clients; what belongs to a site (its data,
its device, its disk) is set by the site, in Flower's node config.
"""

from flower_desloc.app.config.app_folder import PRESETS
from flower_desloc.app.config.errors import ConfigError
from flower_desloc.app.config.load import dump, load, parse
from flower_desloc.app.config.run_config import load_run_config
from flower_desloc.app.config.schema import Config

__all__ = ["PRESETS", "Config", "ConfigError", "dump", "load", "load_run_config", "parse"]
