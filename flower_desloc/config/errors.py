"""What goes wrong with a configuration."""


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, its value and what is allowed."""
