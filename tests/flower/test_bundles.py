"""Laws of bundles: arrays come out as they went in; malformed bundles are refused."""

import json
import math
import re

import pytest
import torch
from federation import generator
from flower_path import Run
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc.core.streams import digest
from flower_desloc.flower import bundles
from flower_desloc.flower.arrays import from_record, records_of, to_array, to_record
from flower_desloc.flower.bundles import STYPE, bundled, unbundled

DTYPES = [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bundles, "_SMALL", 1000)
    monkeypatch.setattr(bundles, "_FULL", 3000)


def record_of(sizes, dtypes=(torch.float32,)):
    values = [torch.randn(size, generator=generator(3, i)) for i, size in enumerate(sizes)]
    return to_record({f"a.{i}": x.to(dtypes[i % len(dtypes)]) for i, x in enumerate(values)})


@given(st.lists(st.integers(0, 400), max_size=30))
def test_every_array_comes_out_as_it_went_in(sizes):
    record = record_of(sizes, DTYPES)
    packed = bundled(record)
    assert list(unbundled(packed).items()) == list(record.items())
    alone = {name: array for name, array in packed.items() if array.stype != STYPE}
    assert all(array is record[name] for name, array in alone.items())
    assert alone.keys() >= {name for name, array in record.items() if len(array.data) > 1000}
    torch.testing.assert_close(from_record(packed), from_record(record), rtol=0, atol=0)


def test_a_hundred_small_arrays_become_few_bundles():
    assert len(bundled(record_of([10] * 100))) == 6  # 17 of 168 bytes each


def changed_index(change):
    def spoil(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        index = json.loads(data[8:end])
        text = json.dumps(change(index), separators=(",", ":")).encode()
        head = len(text).to_bytes(8, "little") + text
        return head + bytes(-len(head) % 64) + data[end + -end % 64 :]

    return spoil


def column(place, value):
    return changed_index(lambda index: [[*row[:place], value, *row[place + 1 :]] for row in index])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"\xff" * 8 + data[8:], "is too long"),
        (lambda data: data[:8] + b"[" * (len(data) - 8), "cannot be read"),
        (lambda data: (10**6).to_bytes(8, "little") + b"[" * 10**6, "cannot be read"),
        (changed_index(lambda index: index[:-1]), "bytes, its arrays"),
        (changed_index(lambda index: [*index, index[0]]), "cannot be read"),
        (changed_index(lambda index: [row[:3] for row in index]), "cannot be read"),
        (column(5, -1), "-1 is no number from 1"),
        (column(5, 0), "0 is no number from 1"),
        (column(5, 10**30), "is no number"),
        (column(3, 7), "cannot be read"),
        (column(3, [math.inf]), "inf is no number"),
        (column(3, [math.nan]), "nan is no number"),
        (column(3, [-1]), "-1 is no number from 0"),
        (column(1, "a"), "one name or place"),
        (column(0, 0), "one name or place"),
        (column(0, 3), "one name or place"),
    ],
)
def test_a_malformed_bundle_is_refused(spoil, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_record(a_bundle(spoil))


def a_bundle(spoil):
    (bundle,) = bundled(record_of([10, 20, 30])).values()
    data = spoil(bundle.data)
    return ArrayRecord({"a.0": Array("uint8", (len(data),), STYPE, data)})


NO_NUMBER = st.none() | st.booleans() | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    NO_NUMBER | st.integers(),
    lambda v: st.lists(v, max_size=6) | st.dictionaries(st.text(max_size=3), v, max_size=3),
)


@given(
    st.one_of(
        st.builds(lambda value: changed_index(lambda index: value), JSON),
        st.builds(column, st.sampled_from([0, 5]), NO_NUMBER),
        st.builds(lambda n: lambda data: data[: n % len(data)], st.integers(0, 10**6)),
        st.builds(lambda more: lambda data: data + more, st.binary(min_size=1, max_size=99)),
    )
)
def test_whatever_else_a_bundle_holds_it_is_refused(spoil):
    with pytest.raises(ValueError, match=r"bundle 'a\.0' cannot be read"):
        from_record(a_bundle(spoil))


def test_a_bundle_in_a_bundle_is_refused():
    (inner,) = bundled(record_of([10, 20])).values()
    (outer,) = bundled(ArrayRecord({"x": inner, "y": to_array(torch.zeros(3))})).values()
    with pytest.raises(ValueError, match="cannot be read"):
        from_record(ArrayRecord({"x": outer}))


def test_a_name_both_in_a_bundle_and_alone_is_refused():
    record = bundled(record_of([10, 20]))
    record["a.1"] = to_array(torch.zeros(3))
    with pytest.raises(ValueError, match="one name or place"):
        from_record(record)


@pytest.mark.parametrize("compression", [{}, {"params": "int8", "exp_avg_sq": "bf16"}], ids=str)
def test_a_run_with_bundles_gives_the_same_bits(compression, tmp_path, monkeypatch):
    def run(folder):
        run = Run("adam", (2, 3, 5), folder, compression=compression)
        bundled_arrays: list[Array] = []

        def observe(asked, reply):
            for message in (asked, reply):
                for record in records_of(ArrayRecord, message.content).values():
                    bundled_arrays.extend(a for a in record.values() if a.stype == STYPE)
            return reply

        run.grid.meddle = observe
        run.start()
        weights = digest(from_record(run.result.arrays)), list(run.result.arrays)
        traffic = [(r.traffic.up, r.traffic.down) for r in run.watch.records]
        return weights, traffic, bool(bundled_arrays)

    monkeypatch.setattr(bundles, "_SMALL", 200)  # the matrix is not bundled, the others are
    plain = run(tmp_path / "plain")
    monkeypatch.setattr(
        "flower_desloc.flower.internals.is_grid", lambda _, name: name == "HttpGrid"
    )
    deployed = run(tmp_path / "deployed")
    assert plain[:2] == deployed[:2]
    assert (plain[2], deployed[2]) == (False, True)
