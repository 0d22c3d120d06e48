"""Memory in large pages holds what any other would."""

import pytest
import torch

from flower_desloc.native.pages import _LEAST, joined, side_by_side

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_side_by_side_lie_new_tensors_each_after_its_header(size, dtype):
    kinds = [(dtype, torch.Size(s)) for s in ((), (0, 3), (size,), (2, 5, 1))]
    tensors = side_by_side(kinds, lambda dtype, shape: bytes([len(shape)]) * 64)
    assert [(t.dtype, t.shape) for t in tensors] == kinds
    whole = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor == number).all()
        assert tensor.is_contiguous()
        if tensor.numel() == 0:
            continue  # it lies nowhere
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().data_ptr() == whole.data_ptr()
        begin = tensor.data_ptr() - whole.data_ptr()
        assert bytes(whole[begin - 64 : begin].tolist()) == bytes([tensor.dim()]) * 64
    assert [t.shape for t in side_by_side(kinds)] == [shape for _, shape in kinds]
    assert side_by_side([]) == []
