"""The noise: normal, and a function of its key alone."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("opacus")

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy.stats import kstest

from flower_desloc.privacy.noise import gaussian, uniform, with_noise

KEY = bytes(range(32))


def test_the_noise_is_standard_normal_across_chunks():
    drawn = gaussian(KEY, torch.empty(3, 100_001))
    assert drawn.shape == (3, 100_001)
    assert kstest(drawn.flatten().numpy(), "norm").pvalue > 0.01
    assert np.corrcoef(drawn[0].numpy(), drawn[1].numpy())[0, 1] == pytest.approx(0, abs=0.01)


def test_the_noise_is_a_function_of_the_key_alone():
    like = torch.empty(50, dtype=torch.float64)
    torch.manual_seed(0)
    first = gaussian(KEY, like)
    torch.manual_seed(1)
    assert torch.equal(gaussian(KEY, like), first)
    assert not torch.isclose(gaussian(KEY[::-1], like), first).any()
    assert first.dtype == torch.float64
    assert gaussian(KEY, torch.empty(0)).numel() == 0
    assert gaussian(KEY, torch.empty(())).shape == ()


def explained(noisy, summed, deviation):
    """Return the share of noisy values that some noise of float32 explains, added to ``summed``."""
    noise = ((noisy.double() - summed.double()) / deviation).float()
    hit = torch.zeros(noisy.shape, dtype=torch.bool)
    for towards in (-math.inf, math.inf):
        tried = noise
        for _ in range(4):
            hit |= summed.float() + tried * deviation == noisy
            tried = torch.nextafter(tried, torch.tensor(towards))
    return hit.double().mean().item()


@pytest.mark.parametrize("deviation", [5.0, 20.0])
def test_the_lowest_bits_do_not_tell_which_sum_was_made_noisy(deviation):
    torch.manual_seed(0)
    summed, record = torch.randn(100_000), torch.randn(100_000) / 300
    other = summed + record
    careless = summed + gaussian(KEY, summed).float() * deviation
    assert explained(careless, summed, deviation) > 0.999 > explained(careless, other, deviation)
    noisy = with_noise(summed.double(), KEY, deviation)
    steps = noisy / 2.0 ** (math.floor(math.log2(deviation)) - 16)
    assert torch.equal(steps, steps.round())
    assert (noisy - summed).std().item() == pytest.approx(deviation, rel=0.01)
    found = [explained(noisy.float(), of, deviation) for of in (summed, other)]
    assert found[0] == pytest.approx(found[1], abs=0.01)


def test_uniforms_are_the_first_53_bits_of_the_cipher_and_never_zero():
    bits = Cipher(ChaCha20(KEY, bytes(16)), mode=None).encryptor().update(bytes(8 * 1000))
    whole = [int.from_bytes(bits[i : i + 8], "little") for i in range(0, 8000, 8)]
    assert uniform(KEY, 1000).tolist() == [((each >> 11) + 1) / 2**53 for each in whole]
