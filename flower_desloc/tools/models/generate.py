"""Text from a model, for a look at what it has learned."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TextStreamer

from flower_desloc.tasks.quiet import quiet


class _Teller(TextStreamer):
    """A streamer that hands pieces of text on, the prompt first."""

    def __init__(self, tokenizer: Any, tell: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._tell = tell

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on a piece of text, up to the last blank."""
        self._tell(text + ("\n" if stream_end else ""))


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tell: Callable[[str], None],
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> int:
    """Continue ``prompt`` by at most ``tokens`` tokens, told piece by piece; return how many.

    Fewer where the model ends the text, or its window is full. At temperature 0 every token is the
    likeliest; above, drawn by the seed.

    Raises ``ValueError`` when the prompt is empty or leaves no room.
    """
    start = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    length = start.shape[1]
    window = getattr(model.config, "max_position_embeddings", None) or length + tokens
    if not length:
        raise ValueError("the prompt is empty; give some text to go on with")
    if length >= window:
        raise ValueError(f"the prompt has {length} tokens, and the model sees {window} at most")
    draw = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    torch.manual_seed(seed)
    with quiet(), torch.no_grad():
        out = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=min(tokens, window - length),
            streamer=_Teller(tokenizer, tell),
            pad_token_id=pad,
            **(draw or {"do_sample": False}),
        )
    return int(out.shape[1]) - int(length)
