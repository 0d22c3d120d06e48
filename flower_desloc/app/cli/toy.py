"""`desloc toy`: runs the example in examples/toy."""

from importlib import import_module

import typer

from flower_desloc.app.config.app_folder import make_importable


def toy(context: typer.Context) -> None:
    """Reproduce the paper's toy problem: states that are averaged, kept or reset.

    The arguments are those of `python -m examples.toy`; `desloc toy --help` shows them.
    """
    make_importable()
    import_module("examples.toy.__main__").app(context.args, prog_name="desloc toy")
