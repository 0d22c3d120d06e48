"""Existing models: a folder of ``save_pretrained``, or a name on the hub."""

import json
import string
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.tasks.caches import cache_error
from flower_desloc.app.tasks.causal_lm.model import given_architecture
from flower_desloc.app.tasks.causal_lm.tokens import BYTES, ByteTokenizer, Tokenizer, load_tokenizer
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.streams import buffers, check_finite, parameters

_OF_THE_FILE = ("_name_or_path", "architectures", "dtype", "model_type", "transformers_version")
"""Keys of a ``config.json`` that describe the weights and not the architecture."""

_SAMPLE = (
    string.printable + "In 1859 the naïve Zürcher wrote f(x) = x ** 2; 你好, мир 😀\n    end\n"
)
"""Text that different tokenizers encode differently."""


def with_architecture(config: Config) -> Config:
    """Return ``config`` with the architecture and the tokenizer of the model in ``run.init_from``.

    No weights are read. The result states everything that a client needs to build the same model.

    Raises ``ConfigError`` if there is no such model, or it does not fit the data.
    """
    name = _where(config)
    try:
        found = architecture_of(name)
        settings = json.loads(found.to_json_string(use_diff=True))
        architecture = {key: each for key, each in settings.items() if key not in _OF_THE_FILE}
        model = replace(config.model, type=found.model_type, config=architecture)
        tokenizer = _tokenizer(config.data.tokenizer, name, found.vocab_size)
        data = replace(config.data, tokenizer=tokenizer)
        num_tokens = load_tokenizer(tokenizer).vocab_size
        given_architecture(model, num_tokens=num_tokens, seq_len=data.seq_len)
    except ValueError as error:
        raise _wrong(config, error) from error
    return replace(config, model=model, data=data)


def weights(config: Config) -> dict[str, dict[str, Tensor]]:
    """Return the model's parameters and saved buffers, as streams, in ``model.dtype``.

    ``config`` is the result of ``with_architecture``.

    Raises ``ConfigError`` if they cannot be read.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    architecture = given_architecture(
        config.model, num_tokens=tokenizer.vocab_size, seq_len=config.data.seq_len
    )
    try:
        dtype = getattr(torch, config.model.dtype)
        model = read(_where(config), config=architecture, dtype=dtype)
    except ValueError as error:
        raise _wrong(config, error) from error
    params = {name: p.detach() for name, p in parameters(model).items()}
    saved = buffers(model)
    return {PARAMS: params, **({BUFFERS: saved} if saved else {})}


def architecture_of(name: str) -> PretrainedConfig:
    """Return the architecture of a model in a folder or on the hub.

    Raises ``ValueError`` if it cannot be read, or is not a causal language model.
    """
    try:
        with quiet():
            found: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        wrong = ValueError(f"no model that transformers could load ({shorten(str(error), 200)})")
        raise cache_error(error, wrong) from error
    if found.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{found.model_type} is not a causal language model")
    of_kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
    if found.architectures and of_kind not in found.architectures:
        raise ValueError(f"{found.architectures[0]} is not a causal language model")
    return found


def read(name: str, **settings: Any) -> Any:
    """Return the model in a folder or on the hub, with its weights.

    Only safetensors are read: a pickle may run code.

    Raises ``ValueError`` if the weights are missing, damaged, incomplete or not finite.
    (transformers alone would draw missing weights at random.)
    """
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name, use_safetensors=True, output_loading_info=True, **settings
            )
    except Exception as error:
        why = shorten(str(error), 200)
        if "ignore_mismatched_sizes" in why:  # advice of transformers, not a reason
            why = "of other shapes than its config.json states"
        wrong = ValueError(f"cannot read its weights, safetensors ({why})")
        raise cache_error(error, wrong) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its weights lack {', '.join(missing[:3])}, {len(missing)} in all")
    try:
        check_finite(PARAMS, {name: p.detach() for name, p in model.named_parameters()})
    except ValueError as error:
        raise ValueError(f"its weights contain NaN or infinity ({error})") from error
    return model


def _where(config: Config) -> str:
    path = Path(config.run.init_from).expanduser()
    return str(path.resolve()) if path.is_dir() else config.run.init_from


def _tokenizer(stated: str, name: str, vocab_size: int) -> str:
    """Return the value for ``data.tokenizer``: the model's own tokenizer, or an equal one."""
    try:
        own = load_tokenizer(name)
    except ValueError as error:
        if stated == BYTES and vocab_size != ByteTokenizer.vocab_size:
            raise ValueError(
                "it has no tokenizer; set data.tokenizer to the one it was trained with"
            ) from error
        return stated
    if _equal(own, ByteTokenizer()):
        name = BYTES  # available at every site
    if stated != BYTES and not _equal(own, load_tokenizer(stated)):
        raise ValueError(
            f"data.tokenizer={stated} has other numbers for the same text than the model's own; "
            "leave data.tokenizer out"
        )
    return name if stated == BYTES else stated


def _equal(one: Tokenizer, other: Tokenizer) -> bool:
    def ids(tokenizer: Tokenizer) -> list[int]:
        return [i for i in tokenizer.encode([_SAMPLE]).ids.tolist() if i != tokenizer.eos_id]

    return ids(one) == ids(other)


def _wrong(config: Config, error: ValueError) -> ConfigError:
    return ConfigError(f"run.init_from={config.run.init_from}: {error}")
