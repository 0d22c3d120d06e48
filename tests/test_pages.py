"""Memory in large pages holds what any other would."""

import pytest
import torch

from flower_desloc.native.pages import _LEAST, copied, joined

SIZES = [0, 1, _LEAST - 64, _LEAST - 63, _LEAST + 4095, 2 * _LEAST + 1]


@pytest.mark.parametrize("size", SIZES)
def test_joined_is_pythons_join(size):
    header = bytes(range(64))
    values = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).byte().numpy()
    data = joined(header, values.data)
    assert type(data) is bytes
    assert data == header + values.tobytes()
    assert hash(data) == hash(bytes(bytearray(data)))  # ends where bytes end, and is not yet hashed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copied_has_the_values_and_leaves_the_neighbours_alone(size, dtype):
    whole = torch.full((size + 200,), 7, dtype=dtype)
    values = torch.arange(size).to(torch.bfloat16)
    result = copied(values, whole[100 : 100 + size])
    assert result.equal(values.to(dtype))
    assert (whole[:100] == 7).all()
    assert (whole[100 + size :] == 7).all()
