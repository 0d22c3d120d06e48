"""A causal language model of the transformers library, with weights drawn from a seed."""

import difflib
import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flower_desloc.config.schema import Model
from flower_desloc.tasks.quiet import quiet

_ALIASES = {
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "num_key_value_heads": ("num_kv_heads",),
    "initializer_range": ("init_std",),
}
"""Settings that some architectures know by another name."""


def build_model(
    model: Model, *, vocab_size: int, seq_len: int, eos_id: int | None, seed: int
) -> PreTrainedModel:
    """Return a new model, a pure function of the arguments; no global generator is touched.

    Dropout is zero, so that the loss is a function of the weights and the batch.

    Raises ``ValueError`` for a ``model.type`` that is no causal language model, or whose own
    further settings do not go with those of ``model``.
    """
    _require_causal(model.type)
    if model.config:
        architecture = given_architecture(model, num_tokens=vocab_size, seq_len=seq_len)
    with quiet(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the accelerators' generators too.
        torch.default_generator.manual_seed(seed)
        try:
            if not model.config:
                architecture = _architecture(model, vocab_size, seq_len, eos_id)
            built: PreTrainedModel = AutoModelForCausalLM.from_config(
                architecture, dtype=getattr(torch, model.dtype)
            )
        except Exception as error:
            raise ValueError(
                f"model.type={model.type}: transformers cannot build it from the settings of "
                f"model ({' '.join(str(error).split())})"
            ) from error
    return built


def given_architecture(model: Model, *, num_tokens: int, seq_len: int) -> PretrainedConfig:
    """Return the architecture that ``model.config`` states, without dropout.

    Raises ``ValueError`` unless it takes ``seq_len`` of ``num_tokens`` different tokens.
    """
    try:
        given: PretrainedConfig = AutoConfig.for_model(model.type, **model.config)
    except Exception as error:
        raise ValueError(
            f"model.config: no configuration of {model.type} ({' '.join(str(error).split())})"
        ) from error
    if num_tokens > given.vocab_size:
        raise ValueError(
            f"data.tokenizer: it has {num_tokens} tokens, the model {given.vocab_size}; set it to "
            "the one the model was trained with"
        )
    longest = getattr(given, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ValueError(f"data.seq_len={seq_len}: the model takes {longest} tokens at most")
    for name, value in given.to_dict().items():
        if _is_dropout(name, value):
            setattr(given, name, 0.0)
    return given


def _require_causal(name: str) -> None:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        raise ValueError(
            f"model.type={name}: must be a causal language model that transformers knows, "
            f"such as {', '.join(near or ['llama', 'qwen3', 'gpt2'])}"
        )


def _architecture(
    model: Model, vocab_size: int, seq_len: int, eos_id: int | None
) -> PretrainedConfig:
    default = AutoConfig.for_model(model.type)
    std = model.initializer_range
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads or model.num_attention_heads,
        "head_dim": model.hidden_size // model.num_attention_heads,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": 1 / math.sqrt(model.hidden_size) if std is None else std,
        "is_decoder": True,
    }
    given = default.to_dict()
    known = given.keys() | default.attribute_map.keys()
    settings = {
        name: value
        for setting, value in settings.items()
        for name in (setting, *_ALIASES.get(setting, ()))
        if name in known
    }
    for needed in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if needed not in settings:
            raise ValueError(f"this architecture has no {needed}")
    settings |= {name: 0.0 for name, value in given.items() if _is_dropout(name, value)}
    if "rope_theta" in (rope := given.get("rope_parameters") or {}):
        settings["rope_parameters"] = rope | {"rope_theta": model.rope_theta}
    # The defaults are ids of another vocabulary.
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": eos_id}
    architecture: PretrainedConfig = AutoConfig.for_model(model.type, **settings, **ids)
    return architecture


def _is_dropout(name: str, value: object) -> bool:
    return isinstance(value, float) and ("dropout" in name or "pdrop" in name)
