"""A client's sequences without end: packed when they are needed, and kept on disk."""

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flower_desloc.tasks.causal_lm.batches import TextBatch
from flower_desloc.tasks.causal_lm.packing import BLOCK, Packer, Pause, Recipe
from flower_desloc.tasks.causal_lm.patience import patiently
from flower_desloc.tasks.causal_lm.tokens import Tokens
from flower_desloc.tasks.compute import cache_folder

KEPT = 256
"""Blocks kept: a gigabyte, with sequences of 2048 tokens of two bytes."""

_MOST_OPEN = 4
"""Packers a process keeps with their files open, for each holds what it has read ahead."""

_packers: OrderedDict[Path, Packer] = OrderedDict()
"""Those, the last used last."""


class Sequences:
    """The sequences of a recipe: number n is the same whoever asks, and whatever is left on disk.

    A file holds a block of sequences, and a small one how to go on after it. Each is written whole
    or not at all, and is the same whoever writes it, so that processes need not wait for each
    other. Of old blocks the small files alone are kept: from them a block is packed again.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        what = repr((recipe, recipe.versions))
        self._folder = cache_folder() / "text" / blake2b(what.encode(), digest_size=16).hexdigest()

    def batch(self, start: int, stop: int) -> TextBatch:
        """Return the sequences from number ``start`` to before ``stop``."""
        ids, num_bytes = [], 0
        while start < stop:
            number, first = divmod(start, BLOCK)
            last = min(BLOCK, first + stop - start)
            block = self._block(number, first, last)
            ids.append(block["ids"].astype(np.int64))
            num_bytes += int(block["num_bytes"].sum())
            start += last - first
        return TextBatch(torch.from_numpy(np.concatenate(ids)), num_bytes)

    def pause(self, number: int) -> Pause:
        """Return what it takes to pack on after so many blocks."""
        while True:
            try:
                with safe_open(self._path(number, "pause"), "numpy") as file:
                    rest = Tokens(file.get_tensor("ids"), file.get_tensor("num_bytes"))
                    return Pause.of(json.loads(file.metadata()["read"]), rest)
            except (FileNotFoundError, SafetensorError):  # not yet, or not as it was written
                self._path(number, "pause").unlink(missing_ok=True)
                self._pack(number - 1)

    def _block(self, number: int, start: int, stop: int) -> dict[str, NDArray[Any]]:
        while True:
            try:
                with safe_open(self._path(number, "block"), "numpy") as file:
                    return {name: file.get_slice(name)[start:stop] for name in file.keys()}  # noqa: SIM118
            except (FileNotFoundError, SafetensorError):
                self._path(number, "block").unlink(missing_ok=True)
                self._pack(number)

    def _pack(self, number: int) -> None:
        """Pack this block, and those before it that it takes."""
        patiently(self._recipe.parts[0].source, lambda: self._packed(number))

    def _packed(self, number: int) -> None:
        done = (n for n in range(number, 0, -1) if self._path(n, "pause").exists())
        first = next(done, 0)
        # Taken out, and not put back should reading fail: what is open is then of no use.
        packer = _packers.pop(self._folder, None)
        if packer is None or not first <= packer.number <= number:
            packer = Packer(self._recipe, first, self.pause(first) if first else None)
        while packer.number <= number:
            tokens, pause = packer.pack()
            self._write(packer.number - 1, tokens, pause)
        _packers[self._folder] = packer
        while len(_packers) > _MOST_OPEN:
            _packers.popitem(last=False)

    def _write(self, number: int, tokens: Tokens, pause: Pause) -> None:
        shape = BLOCK, self._recipe.length
        sizes = tokens.num_bytes.reshape(shape)[:, 1:].sum(axis=1, dtype=np.int64)
        rest = {"ids": pause.rest.ids, "num_bytes": pause.rest.num_bytes}
        block = {"ids": tokens.ids.reshape(shape), "num_bytes": sizes}
        self._replace(self._path(number + 1, "pause"), rest, {"read": json.dumps(pause.about())})
        self._replace(self._path(number, "block"), block, {})
        self._path(number - KEPT, "block").unlink(missing_ok=True)

    def _replace(
        self, path: Path, arrays: Mapping[str, NDArray[Any]], about: dict[str, str]
    ) -> None:
        partial = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".partial")
            os.close(handle)
            partial = Path(name)
            save_file({k: np.ascontiguousarray(a) for k, a in arrays.items()}, partial, about)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            if partial is not None:
                partial.unlink(missing_ok=True)
            raise OSError(
                f"cannot write packed text to {self._folder} ({error}); free the disk, or name "
                "another folder in the environment variable XDG_CACHE_HOME"
            ) from error

    def _path(self, number: int, what: str) -> Path:
        return self._folder / f"{number:08d}.{what}.safetensors"
