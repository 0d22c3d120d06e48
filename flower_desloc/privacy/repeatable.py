"""Computing the same again, bit for bit."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


def accelerators(module: nn.Module) -> list[torch.device]:
    """Return the devices of a module's parameters but the CPU."""
    return sorted({p.device for p in module.parameters() if p.device.type != "cpu"}, key=str)


@contextmanager
def repeatable(devices: Sequence[torch.device]) -> Iterator[None]:
    """Compute the same bits each time on a CPU, and give random generators back their states.

    On accelerators, of which ``devices`` are, sums may differ when they are repeated.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    was_exact = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        try:
            if not devices:
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(was_exact, warn_only=warned)
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def seed_all(seed: bytes, devices: Sequence[torch.device]) -> None:
    """Seed PyTorch's, Python's and NumPy's generators, by at least eight bytes."""
    # Without an accelerator torch.manual_seed keeps its caller's stack, each time.
    of_torch = torch.manual_seed if devices else torch.default_generator.manual_seed
    of_torch(int.from_bytes(seed[:7]))
    random.seed(seed)
    np.random.seed(int.from_bytes(seed[:4]))


def settings() -> tuple[object, ...]:
    """Return PyTorch's settings that change what is computed on a CPU."""
    return (
        *(torch.__version__, torch.get_num_threads(), torch.get_default_dtype(), _precision()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        torch.backends.mkldnn.enabled,
    )


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by PyTorch's newer settings, of which this is one
        return str(torch.backends.fp32_precision)  # type: ignore[attr-defined]
