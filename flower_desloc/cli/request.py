"""What a command is asked to run: a preset and overrides, as the app will see them."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from flower_desloc.cli.checkout import NotACheckoutError, app_folder, listing, opening_comments
from flower_desloc.cli.terminal import USAGE, fail
from flower_desloc.config import Config, ConfigError, load
from flower_desloc.runs.resume import AUTO
from flower_desloc.setup.build import check_streams
from flower_desloc.setup.initial import OF_MODEL_CONFIG, settled

_A_LIST = re.compile(r"[^=]+=[\[{]")
_A_PATH = re.compile(r"(\.{0,2}|~\w*)/")


@dataclass(frozen=True)
class Request:
    """One run of the app in folder ``app``, checked as far as can be before it starts."""

    app: Path
    preset: str
    given: list[str]
    """The overrides that were given, files by absolute paths."""
    words: list[str]
    """Those the app is given: others besides."""
    config: Config

    @classmethod
    def of(
        cls,
        preset: str,
        overrides: Sequence[str],
        more: Callable[[Sequence[str]], Sequence[str]] = lambda _: (),
    ) -> "Request":
        """Return what is asked for; ends the command by exit code 2 if it cannot be.

        ``more`` returns overrides of the command's own, from those that were given.
        """
        try:
            app = app_folder()
            if not preset:
                fail(
                    USAGE, f"which preset? There are\n{listing(opening_comments(app / 'configs'))}"
                )
            if preset.endswith((".yaml", ".yml")):
                preset = str(Path(preset).expanduser().resolve())
            given = _words(overrides)
            words = [*given, *more(given)]
            config = load(preset, words, presets=app / "configs")
            if seen_from_here := _absolute_paths(config):
                given, words = [*given, *seen_from_here], [*words, *seen_from_here]
                config = load(preset, words, presets=app / "configs")
            config = settled(config)
            check_streams(config)
        except (ConfigError, NotACheckoutError) as error:
            fail(USAGE, str(error))
        if config.model.config:
            typer.echo(OF_MODEL_CONFIG)
        return cls(app, preset, given, words, config)

    def run_config(self, output_dir: Path) -> dict[str, str]:
        """Return what `flwr run` is told."""
        return {
            "config": self.preset,
            "overrides": " ".join(self.words),
            "output-dir": str(output_dir.expanduser().resolve()),
        }


def override(key: str, value: str) -> str:
    """Return one override, without a blank: YAML's way to write a text that has some."""
    if not any(map(str.isspace, value)):
        return f"{key}={value}"
    text = json.dumps(value, ensure_ascii=False)
    return f"{key}=" + "".join(f"\\u{ord(c):04x}" if c.isspace() else c for c in text)


def require_writable(folder: Path) -> None:
    """End the command by exit code 2 unless ``folder``, made if need be, may be written to."""
    path = folder.expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(USAGE, f"--output-dir {folder}: {error.strerror}; give a folder that can be made")
    if not os.access(path, os.W_OK):
        fail(USAGE, f"--output-dir {folder}: may not be written to; give another folder")


def _words(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as the app will see them: several in one argument are cut at blanks."""
    words: list[str] = []
    for item in overrides:
        parts = item.split()
        if all("=" in part for part in parts[1:]):
            words += parts
        elif _A_LIST.match(item):
            raise ConfigError(f"override {item!r}: leave out the blanks, as in [a,b] and {{a:1}}")
        else:
            key, _, value = item.partition("=")
            words.append(override(key, value))
    return words


def _absolute_paths(config: Config) -> list[str]:
    """Return overrides for what names a file seen from here; the app runs in another folder."""
    named = {
        "data.source": config.data.source,
        "data.tokenizer": config.data.tokenizer,
        "run.resume": config.run.resume,
        "run.init_from": config.run.init_from,
        **{
            f"task_options.{key}": value
            for key, value in config.task_options.items()
            if isinstance(value, str) and "/" in value
        },
    }
    found: list[str] = []
    for key, value in named.items():
        if value in ("", "builtin", "bytes", AUTO):
            continue
        path = Path(value).expanduser()
        if path.exists():
            absolute = str(path.resolve())
            found += [override(key, absolute)] if absolute != value else []
        elif _A_PATH.match(value) and not key.startswith("task_options."):
            raise ConfigError(f"{key}={value}: there is no such file or folder")
    return found
