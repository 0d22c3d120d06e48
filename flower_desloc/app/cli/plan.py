"""`desloc plan`: half-lives, drift bounds, bytes and time before a run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flower_desloc.app.cli.limits import at_least_one, at_least_zero, option, positive
from flower_desloc.app.cli.run_arguments import Overrides, Preset, listing
from flower_desloc.app.cli.terminal import USAGE, fail, failing
from flower_desloc.app.config import PRESETS, load
from flower_desloc.app.plan.from_config import PAPER, PAPER_CONFIGS, planned_run
from flower_desloc.app.plan.tables import NOT_TIMED, show, show_rules
from flower_desloc.app.plan.wall_clock import MBIT, Link, Topology


def plan(
    preset: Preset = "",
    overrides: Overrides = None,
    params: Annotated[
        float | None, at_least_one("Parameters of the model, in place of the preset's.")
    ] = None,
    workers: Annotated[
        int | None, at_least_one("Workers, in place of the preset's clients.")
    ] = None,
    tokens_per_step: Annotated[
        float | None,
        at_least_one("Of all workers, for text; by default workers x batch_size x seq_len."),
    ] = None,
    value_bytes: Annotated[
        float | None, positive("Bytes per value sent; by default those of model.dtype.")
    ] = None,
    bandwidth: Annotated[float, positive("Bandwidth of the links, in Mbit/s.")] = (
        Link.bandwidth / MBIT
    ),
    latency: Annotated[float, at_least_zero("Latency of a message, in milliseconds.")] = (
        1000 * Link.latency
    ),
    flops: Annotated[
        float | None,
        at_least_one("Peak FLOP/s of a worker; by default an H100's in model.precision."),
    ] = None,
    mfu: Annotated[float, positive("Share of the peak that training reaches.", 1)] = 0.5,
    step_seconds: Annotated[
        float | None,
        positive("Measured seconds of compute per step, in place of --flops and --mfu."),
    ] = None,
    window_seconds: Annotated[
        float,
        at_least_zero("Seconds of an average through a server on a fast link: processes, polls."),
    ] = 0.0,
    overlap: Annotated[
        float, option("Share of communication hidden behind compute, 1 - alpha.", 0, 1)
    ] = 0.0,
    share: Annotated[
        float, positive("Largest acceptable ratio of communication to compute.")
    ] = 0.1,
    rho: Annotated[
        float | None,
        positive("Bound on every coordinate of a gradient, in place of the preset's clipping."),
    ] = None,
    psi: Annotated[float, positive("Share that is left after tau_psi steps.", 0.999999)] = 0.5,
    rules: Annotated[
        bool, typer.Option("--rules", help="Only print the measured rules for periods.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also draw it, into this .png, .pdf or .svg file."),
    ] = None,
) -> None:
    """Show half-lives, drift bounds, bytes, time and recommended periods of a run.

    PRESET is one of `desloc run`, the path of a .yaml file, or a model of the paper: `135m` or
    `1.7b`. KEY=VALUE changes single settings: `desloc plan 1.7b sync.params=64 --bandwidth 100`
    With --params and no PRESET the rest is as in the paper's `1.7b`.

    Nothing is trained or sent. docs/how-to/plan.md has the formulas and their limits.
    """
    if rules:
        show_rules(Console())
        return
    words = overrides or []
    if "=" in preset:
        preset, words = "", [preset, *words]
    with failing(USAGE, ValueError):
        if not preset and params is None:
            known = listing(PAPER_CONFIGS, PRESETS)
            fail(USAGE, f"which preset, or how many --params? There are\n{known}")
        paper = not preset or preset in PAPER
        config = load(preset or "1.7b", words, presets=PAPER_CONFIGS if paper else PRESETS)
        run = planned_run(
            config,
            Link(bandwidth=bandwidth * MBIT, latency=latency / 1000),
            num_params=params or PAPER.get(preset),
            workers=workers,
            tokens=tokens_per_step,
            value_bytes=value_bytes,
            rho=rho,
            step_seconds=step_seconds,
            flops=flops,
            mfu=mfu,
        )
    name = run.name if preset else "plan"
    run = replace(run, name=name, alpha=1 - overlap, share=share, window_seconds=window_seconds)
    if paper:
        run = replace(run, topologies=tuple(Topology))
    show(run, Console(), psi)
    if plot is not None:
        # matplotlib takes a second to import.
        from flower_desloc.app.runs.figures.plan import draw

        with failing(USAGE, OSError, ValueError, where=f"--plot {plot}"):
            if not run.is_timed:
                raise ValueError(NOT_TIMED)
            draw(run, plot)
        typer.echo(f"drawn into {plot}")
