"""`desloc generate`: what a model has learned, in its own words."""

import math
from typing import Annotated

import typer

from flower_desloc.cli.terminal import USAGE, fail


def generate(
    # Typer 0.20 loses the help of arguments with Click 8.5: they are explained below.
    source: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many new ones.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token every time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 0,
) -> None:
    """Let a language model go on with PROMPT.

    MODEL is a run's folder, one of its checkpoints, an exported folder or any other of
    transformers, or a name on the hub. Ends where the model's window does: of a run that is
    `data.seq_len` tokens, the prompt's among them.
    """
    # Imported when wanted: transformers takes seconds.
    from flower_desloc.tools.models.generate import generate as go_on
    from flower_desloc.tools.models.model import load

    if not 0 <= temperature < math.inf:
        fail(USAGE, f"--temperature {temperature}: must be a number at least 0")
    try:
        model, tokenizer = load(source)
        given = go_on(
            model,
            tokenizer,
            prompt,
            lambda text: typer.echo(text, nl=False),
            tokens=tokens,
            temperature=temperature,
            seed=seed,
        )
    except ValueError as error:
        fail(USAGE, str(error))
    if given < tokens:
        typer.echo(f"({given} tokens: the text or the model's window ends here)", err=True)
