"""Laws of the wire: NumPy's bytes, written with one copy and read with none."""

import io
import pickle

import numpy as np
import pytest
import torch
from federation import generator
from flwr.app import Array, ArrayRecord
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from flower_desloc.flower.arrays import from_array, hand_over, room, to_array, values_bytes
from flower_desloc.flower.records import from_record, handed_over, to_record

DTYPES = [
    *(torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
]
SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 4), (0,), (3, 0)]


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=generator(0))).to(dtype)


def is_view(value: torch.Tensor, data: bytes) -> bool:
    begin = np.frombuffer(data, np.uint8).ctypes.data
    return begin < value.data_ptr() < begin + len(data)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_written_as_flower_writes_it_and_read_as_flower_reads_it(shape, dtype):
    value = tensor(shape, dtype)
    ours, flowers = to_array(value), Array(value)
    assert ours == flowers  # dtype, shape, stype and every byte
    assert same(from_array(flowers), value)
    assert same(torch.from_numpy(ours.numpy()), value)


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.T,
        lambda t: t[:, ::2],
        lambda t: t[1:, 3],
        lambda t: t.expand(2, 6, 8),
        lambda t: torch.nn.Parameter(t),
        lambda t: t.reshape(1, 2, 3, 8).contiguous(memory_format=torch.channels_last),
    ],
)
def test_values_that_lie_otherwise_are_the_same_values(layout):
    value = layout(tensor((6, 8), torch.float32))
    assert same(from_array(to_array(value)), value.detach().contiguous())
    assert same(from_array(Array(value)), value.detach().contiguous())  # also in Fortran's order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_in_its_room_is_handed_over_without_a_copy_as_flower_writes_it(dtype):
    values = [tensor(shape, dtype) for shape in SHAPES]
    places = room([(value.dtype, value.shape) for value in values])
    for value, place in zip(values, places, strict=True):
        array = hand_over(place.copy_(value))
        flowers = Array(value)
        assert (array.dtype, array.shape, array.stype) == (
            flowers.dtype,
            flowers.shape,
            "numpy.ndarray",
        )
        assert bytes(array.data) == flowers.data
        assert same(torch.from_numpy(array.numpy()), value)
        assert same(from_array(pickle.loads(pickle.dumps(array, protocol=5))), value)
        if value.numel() and dtype is not torch.bool:  # which is rare enough to be copied
            assert is_view(place, array.data)
            with pytest.raises(TypeError):
                array.data[-1] = 0


@pytest.mark.parametrize(
    "layout",
    [lambda t: t[1:], lambda t: t.T, lambda t: t.clone(), lambda t: t.reshape(-1), lambda t: t[:3]],
)
def test_what_does_not_lie_there_as_it_is_is_copied(layout):
    [place] = room([(torch.float32, torch.Size((6, 8)))])
    value = layout(place.copy_(tensor((6, 8), torch.float32)))
    array = hand_over(value)
    assert type(array.data) is bytes
    assert same(from_array(array), value.contiguous())


@pytest.mark.parametrize("housed", [0, 3, len(SHAPES)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stream_is_handed_over_wherever_its_tensors_lie(dtype, housed):
    """All, some or none in a room; those that were elsewhere stay their owner's."""
    values = {str(shape): tensor(shape, dtype) for shape in SHAPES}
    places = room([(value.dtype, value.shape) for value in values.values()])
    given = dict(values)
    for key, place in list(zip(values, places, strict=True))[:housed]:
        given[key] = place.copy_(values[key])
    elsewhere = [value for key, value in values.items() if given[key] is value]
    flowers = ArrayRecord(values)
    record = handed_over(given)
    assert given == {}
    for value in elsewhere:
        value.zero_()
    assert record == flowers
    assert all(same(from_array(array), from_array(flowers[k])) for k, array in record.items())


def test_what_is_read_is_a_view_and_who_writes_into_it_is_told():
    array = to_array(tensor((3, 5), torch.float32))
    got = from_array(array)
    assert is_view(got, array.data)
    for write in (
        lambda: got.add_(1),
        lambda: got.zero_(),
        lambda: got[0].mul_(2),
        lambda: got.__setitem__((1, 2), 5.0),
        lambda: torch.add(got, 1, out=got),
        lambda: torch.nn.Parameter(got),  # which an optimizer would write
    ):
        with pytest.raises(RuntimeError, match="inference tensor"):
            write()


def test_a_clone_of_what_is_read_is_ones_own():
    value = tensor((3, 5), torch.float32)
    array = to_array(value)
    from_array(array).clone().add_(1)
    assert same(from_array(array), value)


def test_a_view_keeps_what_it_is_a_view_of():
    record = to_record({"a": tensor((1000,), torch.float64)})
    got = from_record(record)["a"]
    del record
    assert same(got, tensor((1000,), torch.float64))


def test_what_is_written_does_not_follow_the_tensor():
    value = tensor((3, 5), torch.float32)
    before, array = value.clone(), to_array(value)
    value.zero_()
    assert same(from_array(array), before)


def test_a_record_is_one_that_flower_makes():
    stream = {"a": tensor((3, 5), torch.float32), "b": tensor((), torch.float64)}
    assert to_record(stream) == ArrayRecord(stream)
    back = to_record(stream).to_torch_state_dict()
    assert back.keys() == stream.keys()
    assert all(same(back[key], stream[key]) for key in stream)


def test_a_type_that_numpy_lacks_is_refused():
    with pytest.raises(TypeError, match="BFloat16"):
        to_array(torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_counted_without_their_header(shape):
    value = tensor(shape, torch.float32)
    assert values_bytes(to_array(value)) == value.nbytes
    assert values_bytes(Array("float32", (4,), "other", b"x" * 21)) == 21


# ------------------------------------------------------------------------------ Bytes of other make

HEADER = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"
DESCRIPTIONS = ["<f4", ">f4", "<f8", "<i8", "|b1", "|u1", "|V4", "<U1", "|O", "<M8", "<c8", "<f9"]
SAID = [
    "()",
    "(2,)",
    "(2, 3)",
    "(6)",
    "(,)",
    "(2 ,3)",
    "(02,)",
    "(-6,)",
    "(2, 0)",
    "[6]",
    "(1" + "0" * 30 + ",)",
]


def numpys(data: bytes) -> np.ndarray | None:
    """What NumPy reads in these bytes, if it is all that they hold."""
    file = io.BytesIO(data)
    try:
        array = npy.read_array(file, allow_pickle=False)
    except Exception:
        return None
    return array if file.tell() == len(data) else None


@settings(max_examples=400)
@given(
    description=st.sampled_from(DESCRIPTIONS),
    order=st.sampled_from(["False", "True", "0"]),
    said=st.sampled_from([*SAID, f"({'1, ' * 40}6)"]),
    padding=st.sampled_from(["", " ", " " * 15, "\n", " \n", " " * 60 + "\n", "\n\n", "#\n"]),
    version=st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x01\x01"]),
    values=st.sampled_from([0, 4, 8, 16, 24, 25, 48]),
    flip=st.none() | st.tuples(st.integers(0, 100), st.integers(1, 255)),
)
@example("<f4", "False", "(2, 3)", " " * 60 + "\n", b"\x01\x00", 24, None)
def test_bytes_are_read_as_numpy_reads_them_or_not_at_all(
    description, order, said, padding, version, values, flip
):
    header = (HEADER % (description, order, said) + padding).encode()
    width = 2 if version[:1] == b"\x01" else 4
    data = bytearray(b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header)
    data += bytes(range(values))
    if flip is not None:
        data[flip[0] % len(data)] ^= flip[1]
    data = bytes(data)
    array = Array("float32", (2, 3), "numpy.ndarray", data)
    try:
        got = from_record(ArrayRecord({"a": array}))["a"]
    except ValueError:
        return
    expected = numpys(data)
    if expected is None:  # NumPy reads what it needs; from_record has counted the rest
        assert not is_view(got, data)
        assert got.nbytes == values_bytes(array)
        return
    assert same(got, torch.from_numpy(expected))


@given(st.integers(0, 200))
def test_a_torn_array_is_refused(length):
    whole = to_array(tensor((3, 5), torch.float32))
    if length >= len(whole.data):
        return
    torn = Array("float32", (3, 5), "numpy.ndarray", whole.data[:length])
    with pytest.raises(ValueError, match=r"cannot be read|came with"):
        from_record(ArrayRecord({"a": torn}))
