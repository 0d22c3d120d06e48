"""`desloc generate`: text from a trained language model."""

import math
from typing import Annotated

import typer

from flower_desloc.cli.terminal import USAGE, fail, failing


def generate(
    source: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue PROMPT with a language model.

    MODEL is a run's folder, one of its checkpoints, an exported folder, any other folder
    of transformers, or a name on the hub. Prompt and new tokens together are limited to the model's
    maximum length: for a run that is `data.seq_len` tokens.
    """
    # transformers takes seconds to import.
    from flower_desloc.tools.models.generate import generate as continue_text
    from flower_desloc.tools.models.model import load

    if not 0 <= temperature < math.inf:
        fail(USAGE, f"--temperature {temperature}: must be a number at least 0")
    with failing(USAGE, ValueError):
        model, tokenizer = load(source)
        count = continue_text(
            model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed
        )
    if count < tokens:
        typer.echo(f"({count} tokens: end of the text or of the model's length)", err=True)
