"""Causal language models: next-token prediction on text."""

from flower_desloc.app.tasks.causal_lm.batches import TextBatch
from flower_desloc.app.tasks.causal_lm.task import CausalLM

__all__ = ["CausalLM", "TextBatch"]
