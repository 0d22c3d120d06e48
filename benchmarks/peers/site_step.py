"""What every site of every peer does in a window: steps of AdamW on 32 tokens each.

Needs PyTorch and transformers alone, and so runs in any peer's environment. ``PEERS_SHAPE`` is the
model's width, that of its feed-forward part, and its blocks, as JSON; ``PEERS_STEPS`` the steps of
a window. Each window appends a line to ``PEERS_STAMPS/SITE``: the time at which its first step
begins, on the clock that all processes of a machine share.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

THREADS = 1
STEPS = int(os.environ["PEERS_STEPS"])


class Model(LlamaForCausalLM):  # type: ignore[misc]  # a lazy import
    """The model, with the same weights everywhere."""

    def __init__(self) -> None:
        width, inner, blocks = json.loads(os.environ["PEERS_SHAPE"])
        torch.manual_seed(0)
        super().__init__(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=blocks,
                num_attention_heads=width // 64,
                vocab_size=256,
                tie_word_embeddings=False,
            )
        )


class Site:
    """A site's model and optimizer."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(THREADS)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(256, (1, 32))
        self._stamps = Path(os.environ["PEERS_STAMPS"]) / name
        self._taken = 0

    def params(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def load(self, params: dict[str, Tensor]) -> None:
        """Take over the averaged parameters."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.as_tensor(params[name]))

    def window(self) -> None:
        """Take the steps of a window."""
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        """Take one step."""
        if self._taken % STEPS == 0:
            with self._stamps.open("a") as file:
                file.write(f"{time.monotonic()}\n")
        self._taken += 1
        self.optimizer.zero_grad()
        self.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self.optimizer.step()
