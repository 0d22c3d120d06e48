"""Laws of serialisation: NumPy's format, written with one copy and read as views."""

import io

import numpy as np
import pytest
import torch
from federation import generator
from flwr.app import Array, ArrayRecord
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib import format as npy

from flower_desloc.flower.arrays import (
    data_of,
    from_array,
    from_record,
    num_bytes,
    plain,
    to_array,
    to_record,
    values_bytes,
)
from flower_desloc.flower.bundles import bundled

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
def test_a_non_contiguous_tensor_is_written_as_its_contiguous_copy(layout):
    value = layout(tensor((6, 8), torch.float32))
    assert same(from_array(to_array(value)), value.detach().contiguous())
    assert same(from_array(Array(value)), value.detach().contiguous())  # Fortran order included


def test_a_read_tensor_is_a_view_and_in_place_operations_on_it_raise():
    array = to_array(tensor((3, 5), torch.float32))
    got = from_array(array)
    assert is_view(got, array.data)
    with pytest.raises(RuntimeError, match="inference tensor"):
        got.add_(1)


def test_an_array_does_not_follow_later_changes_of_its_tensor():
    value = tensor((3, 5), torch.float32)
    before, array = value.clone(), to_array(value)
    value.zero_()
    assert same(from_array(array), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_over_a_tensor_is_the_one_that_would_be_sent_and_no_copy(shape, dtype):
    value = tensor(shape, dtype)
    copied, over = to_record({"w": value})["w"], to_record({"w": value}, copy=False)
    assert b"".join(data_of(over["w"])) == copied.data
    assert num_bytes(over["w"]) == len(copied.data)
    assert from_record(over)["w"] is over["w"].tensor  # type: ignore[attr-defined]
    assert over["w"].tensor.data_ptr() == value.data_ptr()  # type: ignore[attr-defined]
    assert plain(over)["w"] == copied  # dtype, shape, stype and every byte


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_written_in_two_bytes_a_value_and_read_as_a_view(shape):
    value = tensor(shape, torch.bfloat16)
    array = to_array(value)
    assert (array.dtype, values_bytes(array)) == ("bfloat16", 2 * value.numel())
    for record in (ArrayRecord({"a": array}), bundled(ArrayRecord({"a": array, "b": array}))):
        got = from_record(record)["a"]
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert torch.equal(got, value)
    assert not value.numel() or is_view(from_array(array), array.data)
    # Flower's own functions refuse it: the bits are no numbers of another type.
    with pytest.raises(TypeError, match="void"):
        ArrayRecord({"a": array}).to_torch_state_dict()


def test_a_type_that_numpy_lacks_is_refused_by_name():
    with pytest.raises(TypeError, match=r"'a' is of type torch.float8_e5m2.*if p.requires_grad"):
        to_record({"a": torch.zeros(3, dtype=torch.float8_e5m2)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_counted_without_their_header(shape):
    value = tensor(shape, torch.float32)
    assert values_bytes(to_array(value)) == value.nbytes
    assert values_bytes(Array("float32", (4,), "other", b"x" * 21)) == 21


HEADER = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"
DESCRIPTIONS = [
    "<f4",
    ">f4",
    "<f8",
    "<i8",
    "|b1",
    "|u1",
    "|V4",
    "|V2",
    "<U1",
    "|O",
    "<M8",
    "<c8",
    "<f9",
]
SHAPE_TEXTS = [
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


def read_by_numpy(data: bytes) -> np.ndarray | None:
    """Return the array that NumPy reads, if it uses all of the bytes."""
    file = io.BytesIO(data)
    try:
        array = npy.read_array(file, allow_pickle=False)
    except Exception:
        return None
    return array if file.tell() == len(data) else None


@given(
    description=st.sampled_from(DESCRIPTIONS),
    order=st.sampled_from(["False", "True", "0"]),
    shape=st.sampled_from([*SHAPE_TEXTS, f"({'1, ' * 40}6)"]),
    padding=st.sampled_from(["", " ", " " * 15, "\n", " \n", " " * 60 + "\n", "\n\n", "#\n"]),
    version=st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x01\x01"]),
    values=st.sampled_from([0, 4, 8, 12, 16, 24, 25, 48]),
    flip=st.none() | st.tuples(st.integers(0, 100), st.integers(1, 255)),
)
@example("|V2", "False", "(2, 3)", " " * 60 + "\n", b"\x01\x00", 12, None)
@example("<f4", "False", "(2, 3)", " " * 60 + "\n", b"\x01\x00", 24, None)
def test_any_bytes_are_read_as_numpy_reads_them_or_refused(
    description, order, shape, padding, version, values, flip
):
    header = (HEADER % (description, order, shape) + padding).encode()
    width = 2 if version[:1] == b"\x01" else 4
    written = bytearray(b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header)
    written += bytes(range(values))
    if flip is not None:
        written[flip[0] % len(written)] ^= flip[1]
    data = bytes(written)
    array = Array("float32", (2, 3), "numpy.ndarray", data)
    try:
        got = from_record(ArrayRecord({"a": array}))["a"]
    except ValueError:
        return
    expected = read_by_numpy(data)
    if expected is None:  # NumPy ignores trailing bytes; from_record counts them
        assert not is_view(got, data)
        assert got.nbytes == values_bytes(array)
        return
    if expected.dtype == "V2":
        assert got.dtype == torch.bfloat16
        got, expected = got.view(torch.int16), expected.view(np.int16)
    assert same(got, torch.from_numpy(expected))
