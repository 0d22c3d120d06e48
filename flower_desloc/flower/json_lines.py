"""Files of JSON, of which each line is whole or not there."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a ``.jsonl`` file, whole or not at all."""
    data = memoryview((as_json(line) + "\n").encode())
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            file.truncate(end)  # a full disk may have accepted half a line
            raise


def as_json(value: Any, indent: int | None = None) -> str:
    """Return JSON, with null for NaN and infinity, which it does not have."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
