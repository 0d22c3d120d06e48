"""`desloc generate`: text from a trained language model."""

import math
from typing import Annotated, Any

import typer

from flower_desloc.app.cli.terminal import USAGE, fail, failing


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
    # These take seconds to import.
    import torch
    from transformers import TextStreamer

    from flower_desloc.app.models.model import load
    from flower_desloc.app.tasks.quiet import quiet

    if not 0 <= temperature < math.inf:
        fail(USAGE, f"--temperature {temperature}: must be a number at least 0")
    with failing(USAGE, ValueError):
        model, tokenizer = load(source)
    start = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    length = start.shape[1]
    longest = getattr(model.config, "max_position_embeddings", None) or length + tokens
    if not length:
        fail(USAGE, "the prompt is empty; give some text to continue")
    if length >= longest:
        fail(USAGE, f"the prompt has {length} tokens; the model takes {longest} at most")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    torch.manual_seed(seed)
    with quiet(), torch.no_grad():
        out = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=min(tokens, longest - length),
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            pad_token_id=pad,
            **(sampling if temperature else {"do_sample": False}),
        )
    if (count := out.shape[1] - length) < tokens:
        typer.echo(f"({count} tokens: end of the text or of the model's length)", err=True)
