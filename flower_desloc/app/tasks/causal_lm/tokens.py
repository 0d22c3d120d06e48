"""Tokenizers, and how many bytes of text each token stands for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.tasks.caches import cache_error
from flower_desloc.app.tasks.quiet import quiet

BYTES = "bytes"
_SEPARATOR = "\n\n"
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
_CHUNK = 256
"""Documents tokenised at a time: offsets take far more memory than tokens."""
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of a tokenizer without one: the model continues the messages as one text."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as one array of tokens."""

    ids: NDArray[Any]
    num_bytes: NDArray[Any]
    """UTF-8 bytes that each token stands for; they add up to those of the text."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "Tokens":
        return Tokens(self.ids[part], self.num_bytes[part])


class ByteTokenizer:
    """One token for each UTF-8 byte; a blank line between documents."""

    vocab_size = 256
    eos_id: int | None = None
    """The token that ends a document, if there is one."""
    fingerprint = BYTES
    """Equal for tokenizers that produce equal tokens."""

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Return the tokens of all documents, joined."""
        ids = np.frombuffer(_SEPARATOR.join(documents).encode(), dtype=np.uint8)
        return Tokens(ids, np.broadcast_to(np.uint8(1), ids.shape))

    def encode_each(self, documents: Sequence[str]) -> Iterator[Tokens]:
        """Yield the tokens of each document, with its separator or end-of-text token."""
        return (self.encode([text, ""]) for text in documents)

    def vocabulary_digest(self) -> str:
        """Return the name: there is one such vocabulary."""
        return BYTES

    def save(self, folder: Path) -> None:
        """Write an equal tokenizer that ``transformers`` can load.

        Its beginning, end and padding are one token, the byte 0xFF, which no UTF-8 text contains:
        ``lm-eval`` and generation need such tokens, and the model has no more than 256. Text that
        looks like this token is encoded as bytes.
        """
        tokenizer = tokenizers.Tokenizer(models.BPE(_byte_vocabulary(), []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), _END_OF_TEXT[0])
        _save(_wrapped(tokenizer, split_special_tokens=True, **special), folder)


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library; its end-of-text token ends every document.

    Without such a token, a blank line separates documents.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = 1 + max(self._backend.get_vocab().values())
        self.eos_id: int | None = tokenizer.eos_token_id
        self.fingerprint = f"{blake2b(self._backend.to_str().encode()).hexdigest()} {self.eos_id}"

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Return the tokens of all documents, joined."""
        if self.eos_id is None:
            documents = [text + _SEPARATOR for text in documents[:-1]] + [*documents[-1:]]
        empty = Tokens(np.empty(0, self._dtype), np.empty(0, np.uint32))
        return joined([empty, *self._each(documents)])

    def encode_each(self, documents: Sequence[str]) -> Iterator[Tokens]:
        """Yield the tokens of each document, with its separator or end-of-text token."""
        return self._each(
            documents if self.eos_id is not None else [text + _SEPARATOR for text in documents]
        )

    def vocabulary_digest(self) -> str:
        """Return a digest of all tokens with their numbers, whatever wrote the file."""
        tokens = sorted((number, token) for token, number in self._backend.get_vocab().items())
        return blake2b(repr([*tokens, self.eos_id]).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer."""
        _save(self._tokenizer, folder)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.vocab_size - 1)

    def _each(self, documents: Sequence[str]) -> Iterator[Tokens]:
        end = [] if self.eos_id is None else [self.eos_id]
        for start in range(0, len(documents), _CHUNK):
            chunk = [*documents[start : start + _CHUNK]]
            encodings = self._backend.encode_batch(chunk, add_special_tokens=False)
            for text, encoding in zip(chunk, encodings, strict=True):
                sizes = _bytes_per_token(text, encoding.offsets)
                yield Tokens(
                    np.asarray([*encoding.ids, *end], self._dtype),
                    np.append(sizes, np.zeros(len(end), np.uint32)),
                )


Tokenizer = ByteTokenizer | SubwordTokenizer


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of ``data.tokenizer``, loaded once in each process.

    Raises ``ValueError`` if there is none of that name, or it cannot map tokens to positions in the
    text.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if name.endswith(".json") and not path.is_file():
        raise ValueError(f"data.tokenizer={name}: there is no such file")
    try:
        with quiet():
            if path.is_file():
                return _tokenizer(_from_file(path))
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:
        wrong = ValueError(
            f"data.tokenizer={name}: neither `bytes`, nor a tokenizer.json, nor a tokenizer that "
            f"transformers could load ({one_line(error)})"
        )
        raise cache_error(error, wrong) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"data.tokenizer={name}: transformers has no fast tokenizer of that name, and without "
            "one the bytes a token stands for are unknown"
        )
    if knows_nothing(tokenizer):
        raise ValueError(f"data.tokenizer={name}: its vocabulary is empty; its files are missing")
    return _tokenizer(tokenizer)


def knows_nothing(tokenizer: Any) -> bool:
    """Return whether its vocabulary is empty, as transformers makes it when files are missing."""
    return len(tokenizer) <= len(tokenizer.all_special_ids)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate at least one part."""
    return Tokens(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.num_bytes for part in parts]),
    )


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The file does not state which token ends a text.
    end = next((token for token in _END_OF_TEXT if tokenizer.token_to_id(token) is not None), None)
    return _wrapped(tokenizer, eos_token=end)


def _wrapped(tokenizer: tokenizers.Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def _tokenizer(found: Any) -> Tokenizer:
    is_bytes = found.get_vocab() == _byte_vocabulary()  # saved by ByteTokenizer
    return ByteTokenizer() if is_bytes else SubwordTokenizer(found)


def _byte_vocabulary() -> dict[str, int]:
    # The library represents a byte as a printable character: itself, otherwise one of the next
    # free ones, in order. (With its byte fallback, one wrong byte would turn a whole text into
    # replacement characters.)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    free = iter(sorted(character for character in alphabet if ord(character) > 255))
    pieces = [chr(byte) if chr(byte) in alphabet else next(free) for byte in range(255)]
    return {piece: byte for byte, piece in enumerate([*pieces, _END_OF_TEXT[0]])}


def _save(tokenizer: Any, folder: Path) -> None:
    tokenizer.chat_template = tokenizer.chat_template or _CHAT
    tokenizer.save_pretrained(folder)


def _bytes_per_token(text: str, offsets: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """Return the bytes from the end of the previous token to the end of each token.

    Text that no token covers (spaces, in some tokenizers) counts for the next token, and at the
    end of the text for the last. If tokens share a character, its bytes count for the first.
    """
    if not offsets:
        return np.empty(0, np.uint32)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.uint32) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate([end for _, end in offsets])
    ends[-1] = len(text)
    return np.diff(before[ends], prepend=0).astype(np.uint32)
