"""LoRA with the library peft: only the adapters are trained and sent, with their moments.

desloc run lora.yaml task_options.base=FOLDER
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from flower_desloc.app.tasks.causal_lm import CausalLM
from flower_desloc.app.tasks.quiet import quiet


class LoRA(CausalLM):
    """The task ``causal_lm``, with adapters for the frozen weights of ``task_options.base``."""

    def __init__(self, config):
        super().__init__(config)
        self.seed, self.options = config.run.seed, config.task_options

    def build_model(self):
        """Return the base with new adapters; every site reads the same base."""
        with quiet():
            base = AutoModelForCausalLM.from_pretrained(self.options["base"])
        torch.manual_seed(self.seed)
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=self.options["rank"],
            lora_alpha=2 * self.options["rank"],
        )
        return get_peft_model(base, lora)
