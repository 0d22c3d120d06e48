"""The command `desloc`, called in this process."""

from click.testing import Result
from typer.testing import CliRunner

from flower_desloc.app.cli import app


def desloc(*arguments: object) -> Result:
    """Return what the command prints and its exit code; an exception in it fails the test."""
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def accepted(*arguments: object) -> str:
    """Return what a command prints that must succeed."""
    result = desloc(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """Return the error, as one line, of a command that must be refused."""
    result = desloc(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())
