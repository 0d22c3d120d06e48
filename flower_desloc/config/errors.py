"""The error of a wrong configuration, and errors as one line."""


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, its value and what is allowed."""


def one_line(error: BaseException) -> str:
    """Return the text of an error of another library, as part of a message."""
    return " ".join(str(error).split())
