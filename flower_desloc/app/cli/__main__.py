"""Run the command ``desloc`` with this package: ``python -m flower_desloc.app.cli``."""

from flower_desloc.app.cli import app

app()
