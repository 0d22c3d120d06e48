"""The extras of ``pyproject.toml``: what to type for one that is missing."""


def to_install(extra: str) -> str:
    """Return the commands that install an extra, from a package registry or in a clone.

    >>> to_install("wandb")
    "pip install 'flower-desloc[wandb]', or in a clone pip install '.[wandb]'"
    """
    return f"pip install 'flower-desloc[{extra}]', or in a clone pip install '.[{extra}]'"
