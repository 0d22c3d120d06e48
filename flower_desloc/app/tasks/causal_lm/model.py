"""Causal language models of the transformers library, with weights drawn from a seed."""

import math
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.schema import Model
from flower_desloc.app.tasks.causal_lm.probe import REMEDY, probe
from flower_desloc.app.tasks.models import new_model, no_dropout, require_type

_ALIASES = {
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "num_key_value_heads": ("num_kv_heads",),
    "initializer_range": ("init_std",),
}
"""Other names of a setting in some architectures."""


def build_model(
    model: Model, *, vocab_size: int, seq_len: int, eos_id: int | None, seed: int
) -> PreTrainedModel:
    """Return a new model without dropout, a pure function of the arguments.

    Raises ``ValueError`` if ``model.type`` is not a causal language model, or transformers cannot
    build or compute it from the settings of ``model``.
    """
    require_type(
        model.type,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "a causal language model",
        ["llama", "qwen3", "gpt2"],
    )
    given = (
        given_architecture(model, num_tokens=vocab_size, seq_len=seq_len) if model.config else None
    )
    built = new_model(
        AutoModelForCausalLM,
        lambda: given or _architecture(model, vocab_size, seq_len, eos_id),
        model,
        seed,
        remedy="correct model.config" if given else REMEDY,
    )
    probe(built, model, num_tokens=vocab_size, seq_len=seq_len)
    return built


def given_architecture(model: Model, *, num_tokens: int, seq_len: int) -> PretrainedConfig:
    """Return the architecture that ``model.config`` states, without dropout.

    Raises ``ValueError`` if it does not take ``seq_len`` tokens, or not ``num_tokens`` different
    ones.
    """
    try:
        given: PretrainedConfig = AutoConfig.for_model(model.type, **model.config)
    except Exception as error:
        raise ValueError(
            f"model.config: no configuration of {model.type} ({one_line(error)})"
        ) from error
    if num_tokens > given.vocab_size:
        raise ValueError(
            f"data.tokenizer: it has {num_tokens} tokens, the model {given.vocab_size}; set it to "
            "the one the model was trained with"
        )
    longest = getattr(given, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ValueError(f"data.seq_len={seq_len}: the model takes at most {longest} tokens")
    for name, value in no_dropout(given.to_dict()).items():
        setattr(given, name, value)
    return given


def _architecture(
    model: Model, vocab_size: int, seq_len: int, eos_id: int | None
) -> PretrainedConfig:
    default = AutoConfig.for_model(model.type)
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
        "initializer_range": 1 / math.sqrt(model.hidden_size),  # the paper's
        "is_decoder": True,
    }
    defaults = default.to_dict()
    known = defaults.keys() | default.attribute_map.keys()
    settings = {
        name: value
        for setting, value in settings.items()
        for name in (setting, *_ALIASES.get(setting, ()))
        if name in known
    }
    for needed in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if needed not in settings:
            raise ValueError(f"this architecture has no {needed}")
    settings |= no_dropout(defaults)
    if "rope_theta" in (rope := defaults.get("rope_parameters") or {}):
        settings["rope_parameters"] = rope | {"rope_theta": model.rope_theta}
    # The default ids belong to another vocabulary.
    ids = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": eos_id}
    architecture: PretrainedConfig = AutoConfig.for_model(model.type, **settings, **ids)
    return architecture
