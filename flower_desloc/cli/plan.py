"""`desloc plan`: what the theory says of a run before it is run."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from flower_desloc.cli.checkout import app_folder, opening_comments, presets
from flower_desloc.cli.terminal import USAGE, fail
from flower_desloc.config import Config, ConfigError, load
from flower_desloc.plan import from_config
from flower_desloc.plan.setting import Setting
from flower_desloc.plan.tables import Assumptions, show
from flower_desloc.plan.wall_clock import Link, compute_seconds

_GIGABIT: Final = 1e9 / 8
_TEXT: Final = "causal_lm"

Number = float | int | None
Check = Callable[[typer.CallbackParam, Number], Number]


def _must_be(wanted: str, holds: Callable[[float], bool]) -> Check:
    """Return a check of an option, so that each states its limits where it stands."""

    def check(param: typer.CallbackParam, value: Number) -> Number:
        if value is not None and not (math.isfinite(value) and holds(value)):
            fail(USAGE, f"{param.opts[0]}={value:g}: must be {wanted}")
        return value

    return check


_at_least_one = _must_be("at least 1", lambda value: value >= 1)
_not_negative = _must_be("at least 0", lambda value: value >= 0)
_positive = _must_be("above 0", lambda value: value > 0)
_from_zero_to_one = _must_be("at least 0 and at most 1", lambda value: 0 <= value <= 1)
_above_zero_to_one = _must_be("above 0 and at most 1", lambda value: 0 < value <= 1)
_below_one = _must_be("at least 0 and below 1", lambda value: 0 <= value < 1)
_between = _must_be("above 0 and below 1", lambda value: 0 < value < 1)


def plan(
    # Typer 0.20 loses the help of arguments with Click 8.5: they are explained below.
    preset: Annotated[str, typer.Argument(show_default=False)] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    params: Annotated[
        float | None,
        typer.Option(
            callback=_at_least_one, help="Parameters of the model, in place of the preset's."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(callback=_at_least_one, help="Workers, in place of the preset's clients."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(callback=_at_least_one, help="Local steps, in place of run.steps."),
    ] = None,
    tokens_per_step: Annotated[
        float | None,
        typer.Option(
            callback=_at_least_one,
            help="By all workers together; by default workers x data.batch_size x data.seq_len.",
        ),
    ] = None,
    value_bytes: Annotated[
        float | None,
        typer.Option(
            callback=_positive,
            help="Bytes a value takes on the wire; by default those of model.dtype.",
        ),
    ] = None,
    bandwidth: Annotated[
        float,
        typer.Option(callback=_positive, help="Of a worker's link and the server's, in Gbit/s."),
    ] = 1.0,
    latency: Annotated[
        float, typer.Option(callback=_not_negative, help="Of a message, in milliseconds.")
    ] = 50.0,
    flops: Annotated[
        float,
        typer.Option(
            callback=_at_least_one,
            help="Peak FLOP/s of a worker; the default is an H100's.",
            show_default="989e12",
        ),
    ] = 989e12,
    mfu: Annotated[
        float,
        typer.Option(callback=_above_zero_to_one, help="Share of the peak that training reaches."),
    ] = 0.5,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            callback=_positive,
            help="Seconds a step computes, as measured, in place of --flops and --mfu.",
        ),
    ] = None,
    overlap: Annotated[
        float,
        typer.Option(
            callback=_from_zero_to_one,
            help="Share of communication behind compute, 1 - alpha.",
        ),
    ] = 0.0,
    share: Annotated[
        float,
        typer.Option(callback=_positive, help="What communication may take, in shares of compute."),
    ] = 0.1,
    beta1: Annotated[
        float | None,
        typer.Option(callback=_below_one, help="Decay of the first moment."),
    ] = None,
    beta2: Annotated[
        float | None,
        typer.Option(callback=_below_one, help="Decay of the second moment."),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(
            callback=_positive,
            help="What no coordinate of a gradient exceeds, in place of the preset's clipping.",
        ),
    ] = None,
    psi: Annotated[
        float,
        typer.Option(callback=_between, help="What is left after tau_psi steps."),
    ] = 0.5,
    smoothness: Annotated[
        float, typer.Option(callback=_positive, help="Theorem 1's L, which is seldom known.")
    ] = 1.0,
    dissimilarity: Annotated[
        float,
        typer.Option(
            callback=_at_least_one, help="Theorem 1's B; 1 where all workers have the same data."
        ),
    ] = 1.0,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also draw it, into this .png, .pdf or .svg file."),
    ] = None,
) -> None:
    """Show what the theory says of a run: half-lives, drift, step sizes, bytes, time, periods.

    PRESET is one of `desloc run`, the path of a .yaml file, or a model of the paper: `135m` or
    `1.7b`. KEY=VALUE changes single settings: `desloc plan 1.7b sync.params=64 --bandwidth 0.1`
    With --params and no PRESET the rest is as in the paper's `1.7b`.

    Nothing is trained, nothing is sent. The formulas, and where they end, are in docs/plan.md.
    """
    words = overrides or []
    if "=" in preset:
        preset, words = "", [preset, *words]
    try:
        if not preset and params is None:
            fail(USAGE, f"which preset, or how many --params? There are\n{_listing()}")
        config = _load(preset or "1.7b", words)
        _replace(config, steps, beta1, beta2)
        size = params or from_config.PAPER.get(preset) or from_config.model_size(config)
        crowd = workers or from_config.workers(config)
        tokens = tokens_per_step or _tokens(config, crowd)
        if step_seconds is None:
            if tokens is None:
                raise ConfigError(
                    f"task={config.task}: the compute of a step is known of text only; give "
                    "--step-seconds, or --tokens-per-step"
                )
            step_seconds = compute_seconds(size, tokens, workers=crowd, flops=flops, mfu=mfu)
        setting = Setting(
            name=config.run.name if preset else "plan",
            optimizer=config.optimizer.name,
            num_params=size,
            streams=from_config.streams(
                config,
                size,
                value_bytes=value_bytes or from_config.value_bytes(config),
                rho=rho or from_config.gradient_bound(config),
            ),
            steps=config.run.steps,
            workers=crowd,
            tokens=tokens,
            compute=step_seconds,
            link=Link(bandwidth=bandwidth * _GIGABIT, latency=latency / 1000),
            alpha=1 - overlap,
            share=share,
            coins=config.sync_mode == "probabilistic",
        )
    except ValueError as error:
        fail(USAGE, str(error))
    show(setting, Console(), Assumptions(psi, smoothness, dissimilarity))
    if plot is not None:
        _draw(setting, plot)


def _load(preset: str, words: list[str]) -> Config:
    if preset in from_config.PAPER:
        return load(preset, words, presets=from_config.PAPER_SETTINGS)
    return load(preset, words, presets=app_folder() / "configs")


def _replace(config: Config, steps: int | None, beta1: float | None, beta2: float | None) -> None:
    """Put into ``config`` what options state."""
    if steps is not None:
        config.run.steps = steps
    first, second = config.optimizer.betas
    if beta1 is not None:
        first = config.optimizer.momentum = beta1
    config.optimizer.betas = (first, second if beta2 is None else beta2)


def _tokens(config: Config, workers: int) -> float | None:
    return workers * config.data.batch_size * config.data.seq_len if config.task == _TEXT else None


def _draw(setting: Setting, path: Path) -> None:
    # matplotlib takes a second to import.
    from flower_desloc.plan.picture import draw

    try:
        draw(setting, path)
    except (OSError, ValueError) as error:
        fail(USAGE, f"--plot {path}: {error}")
    typer.echo(f"drawn into {path}")


def _listing() -> str:
    known: Mapping[str, str] = {
        **opening_comments(from_config.PAPER_SETTINGS),
        **presets(app_folder()),
    }
    width = max(map(len, known))
    return "\n".join(f"  {name:<{width}}  {what}" for name, what in known.items())
