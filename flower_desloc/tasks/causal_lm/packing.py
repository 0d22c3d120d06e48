"""Documents of several domains, mixed by weight and packed into sequences of equal length."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flower_desloc.tasks.causal_lm.stream import Documents, Part, Position, domain
from flower_desloc.tasks.causal_lm.tokens import Tokens, joined, load_tokenizer

BLOCK = 1024
"""Sequences packed at a time; among so many, documents are shuffled."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a client's sequences are a function of."""

    parts: tuple[Part, ...]
    tokenizer: str
    length: int
    """Tokens a sequence."""
    key: tuple[int, ...]
    """Seeds what is drawn: the order of files, and of documents."""

    @property
    def versions(self) -> tuple[str, ...]:
        """What may differ though the recipe reads the same."""
        versions = [domain(part.source, part.domain).version for part in self.parts]
        return (load_tokenizer(self.tokenizer).fingerprint, *versions)


@dataclass(frozen=True)
class Read:
    """What has been read of one part."""

    position: Position = field(default_factory=Position)
    num_bytes: int = 0
    """UTF-8 bytes of its documents."""
    num_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Pause:
    """All it takes to pack on after a block."""

    read: tuple[Read, ...]
    rest: Tokens
    """Tokens of documents drawn that did not fit."""

    def about(self) -> list[dict[str, Any]]:
        """Return what has been read, as JSON can hold it."""
        return [asdict(read) for read in self.read]

    @classmethod
    def of(cls, about: Sequence[Mapping[str, Any]], rest: Tokens) -> "Pause":
        """Return the pause that ``about`` tells of."""
        return cls(
            tuple(Read(**{**each, "position": Position(**each["position"])}) for each in about),
            rest,
        )


class Packer:
    """Packs one block of a recipe after the other."""

    def __init__(self, recipe: Recipe, number: int = 0, pause: Pause | None = None) -> None:
        self.number = number
        """The block that is packed next."""
        self._recipe = recipe
        self._tokenizer = load_tokenizer(recipe.tokenizer)
        self._read = [*pause.read] if pause else [Read() for _ in recipe.parts]
        self._rest = pause.rest if pause else joined([*self._tokenizer.encode_each([""])])[:0]
        self._documents = [
            Documents(part, [*recipe.key, index], read.position)
            for index, (part, read) in enumerate(zip(recipe.parts, self._read, strict=True))
        ]
        self._texts = [iter(documents) for documents in self._documents]

    def pack(self) -> tuple[Tokens, Pause]:
        """Return the next block's tokens, and what it takes to go on after it.

        Raises what reading raises; the packer is of no use then.
        """
        rng = np.random.default_rng([*self._recipe.key, len(self._texts), self.number])
        room = BLOCK * self._recipe.length
        packed = [self._rest]
        while (missing := room - sum(map(len, packed))) > 0:
            drawn = self._draw(missing)
            rng.shuffle(drawn)
            each = self._tokenizer.encode_each([text for _, text in drawn])
            for (index, text), tokens in zip(drawn, each, strict=True):
                packed.append(tokens)
                self._count(index, text, len(tokens))
        tokens = joined(packed)
        self._rest = tokens[room:]
        self.number += 1
        read = zip(self._read, self._documents, strict=True)
        return tokens[:room], Pause(
            tuple(Read(d.position, r.num_bytes, r.num_tokens) for r, d in read), self._rest
        )

    def _draw(self, num_tokens: int) -> list[tuple[int, str]]:
        """Return documents of about so many tokens, rather fewer, each with its part's number.

        Each is of the part that lies farthest behind its weight, in tokens: exact for what was
        packed before, and for what is drawn now reckoned from its bytes.
        """
        expected = [float(read.num_tokens) for read in self._read]
        enough = sum(expected) + 0.95 * num_tokens
        drawn: list[tuple[int, str]] = []
        while not drawn or sum(expected) < enough:
            index = min(
                range(len(expected)), key=lambda i: expected[i] / self._recipe.parts[i].weight
            )
            text = next(self._texts[index])
            drawn.append((index, text))
            read = self._read[index]
            per_byte = read.num_tokens / read.num_bytes if read.num_bytes else 1.0
            expected[index] += len(text.encode()) * per_byte
        return drawn

    def _count(self, index: int, text: str, num_tokens: int) -> None:
        read = self._read[index]
        self._read[index] = Read(
            read.position, read.num_bytes + len(text.encode()), read.num_tokens + num_tokens
        )
