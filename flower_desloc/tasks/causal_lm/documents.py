"""Cut long text into documents, and split documents into a training and a held-out part."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

DOCUMENT_SIZE = 4000


def cut(paragraphs: Iterable[str], size: int = DOCUMENT_SIZE) -> Iterator[str]:
    r"""Join paragraphs to documents of at most ``size`` characters.

    A longer paragraph is cut at the end of a line, otherwise at a space, otherwise anywhere.

    >>> list(cut(["one", "two", "three four"], size=8))
    ['one\n\ntwo', 'three', 'four']
    """
    document = ""
    for paragraph in paragraphs:
        for piece in _pieces(paragraph.strip("\n"), size):
            if document and len(document) + 2 + len(piece) > size:
                yield document
                document = ""
            document += "\n\n" + piece if document else piece
    if document:
        yield document


def split(documents: Sequence[str], heldout_fraction: float) -> tuple[list[str], list[str]]:
    """Return the documents to train on and the held-out documents; neither part is empty.

    The hash of a document's content decides: neither the order of the documents nor the seed
    matters, and equal documents are in the same part. A single document is split by its text.

    Raises ``ValueError`` if there is nothing to split.
    """
    if not documents:
        raise ValueError("there is no document to split")
    ranked = sorted(set(documents), key=lambda text: hashlib.blake2b(text.encode()).digest())
    if len(ranked) == 1:
        head, tail = _split_text(ranked[0], heldout_fraction)
        return [head], [tail]
    num_heldout = min(max(1, round(heldout_fraction * len(ranked))), len(ranked) - 1)
    heldout = set(ranked[:num_heldout])
    return (
        [text for text in documents if text not in heldout],
        [text for text in documents if text in heldout],
    )


def _pieces(text: str, size: int) -> Iterator[str]:
    while len(text) > size:
        ends = (text.rfind(mark, 1, size + 1) for mark in "\n ")
        at = next((end for end in ends if end > 0), size)
        yield text[:at]
        text = text[at + (text[at] in "\n ") :]
    if text.strip():
        yield text


def _split_text(text: str, heldout_fraction: float) -> tuple[str, str]:
    if len(text) < 2:
        raise ValueError("a text of one character cannot be split")
    at = min(max(1, round((1 - heldout_fraction) * len(text))), len(text) - 1)
    space = max(text.rfind(mark, 1, at) for mark in "\n ")
    at = space if space > 0 else at
    return text[:at], text[at:]
