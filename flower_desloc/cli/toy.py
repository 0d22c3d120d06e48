"""`desloc toy`: runs the example in examples/toy of the checkout."""

import sys
from importlib import import_module

import typer

from flower_desloc.cli.checkout import NotACheckoutError, app_folder
from flower_desloc.cli.terminal import USAGE, failing


def toy(context: typer.Context) -> None:
    """Reproduce the paper's toy problem: states that are averaged, kept or reset.

    The arguments are those of `python -m examples.toy`; `desloc toy --help` shows them.
    """
    with failing(USAGE, NotACheckoutError):
        sys.path.append(str(app_folder()))
    import_module("examples.toy.__main__").app(context.args, prog_name="desloc toy")
