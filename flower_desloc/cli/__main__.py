"""Run the command ``desloc`` with this package: ``python -m flower_desloc.cli``."""

from flower_desloc.cli import app

app()
