"""The state of the global random generators, which a training loop draws from."""

import random
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's generators.

    They are numbers, texts and tensors, as ``torch.load(weights_only=True)`` reads them.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``get_random_state`` has returned, perhaps on a machine with other GPUs."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
