"""Lossy formats: what they lose, that it is made up for, and that everybody has the same."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from federation import assert_close, assert_same
from flower_path import Run, oracle
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.core import compression
from flower_desloc.core.compression import coded_bytes, decode_stream, encode_stream
from flower_desloc.core.formats import Format
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.traffic import compressed_bytes
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy

LOSSY = ["bf16", "int8", "int4", "int2"]
BLOCK = {"int8": 256, "int4": 64, "int2": 64}
LEVELS = {"int8": 127, "int4": 7}
ALL_CODED = {PARAMS: "int4", "exp_avg": "int8", "exp_avg_sq": "int8"}

seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from([(), (1,), (5,), (0, 3), (63,), (64,), (65, 3), (2, 3, 129), (1000,)])
formats = st.sampled_from(LOSSY)


def values(seed: int, shape: tuple[int, ...], spread: float = 3.0) -> Tensor:
    """Normal values over many orders of magnitude, with zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.exp(spread * torch.randn(shape, generator=draw))
    return x * (torch.rand(shape, generator=draw) > 0.1)


def kind_of(*, signed: bool) -> Kind:
    return Kind.FIRST_MOMENT if signed else Kind.SECOND_MOMENT


def encode(x: Tensor, format_: Any, *, signed: bool) -> Tensor:
    return encode_stream(kind_of(signed=signed), {"x": x}, format_).coded["x"]


def decode(data: Tensor, format_: Any, like: Tensor, *, signed: bool) -> Tensor:
    kind = kind_of(signed=signed)
    return decode_stream("any", {"x": data}, format_, {"x": like}, kind=kind)["x"]


def there_and_back(x: Tensor, format_: Any, *, signed: bool) -> Tensor:
    return decode(encode(x, format_, signed=signed), format_, x, signed=signed)


# ------------------------------------------------------------------------------------------ Codes


@given(seeds, shapes, formats, st.booleans())
def test_a_code_has_as_many_bytes_as_is_said_and_comes_back_in_shape(seed, shape, format_, signed):
    x = values(seed, shape).abs()
    data = encode(x, format_, signed=signed)
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    assert len(data) == coded_bytes(format_, x, signed=signed)
    back = decode(data, format_, x, signed=signed)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    with pytest.raises(ValueError, match="bytes of"):
        decode(torch.cat([data, data.new_zeros(1)]), format_, x, signed=signed)


@given(seeds, shapes, formats, st.booleans())
def test_a_tensor_is_encoded_alike_in_one_part_and_in_many(seed, shape, format_, signed):
    x, base, residual = (values(seed + i, shape) for i in range(3))
    x = x if signed else x.abs()
    before = {"reference": {"x": base}, "residual": {"x": residual}} if signed else {}
    kind = kind_of(signed=signed)
    results = []
    for at_once in (1 << 16, 256):  # a block of int8
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compression, "_AT_ONCE", at_once)
            sent = encode_stream(kind, {"x": x}, format_, **before)
            results.append((sent.coded, sent.received, sent.residual))
            reference = before.get("reference")
            args = "any", sent.coded, format_, {"x": x}
            assert_same(decode_stream(*args, kind=kind, reference=reference), sent.received)
    for one, many in zip(*results, strict=True):
        assert_same(one, many)


def test_bytes_of_a_value():
    x = torch.zeros(1_000_000)
    sizes: dict[Format, float] = {"fp32": 4, "bf16": 2}
    sizes |= {"int8": 1 + 2 / 256, "int4": 0.5 + 2 / 64, "int2": 0.25 + 4 / 64}
    for format_, each in sizes.items():
        assert coded_bytes(format_, x) == pytest.approx(each * 1_000_000, rel=1e-4)
    compressed = compressed_bytes({"a": {"x": x}, "b": {"x": x}}, {"b": "bf16"}, {})
    assert compressed == {"a": 4_000_000, "b": 2_000_000}


@given(seeds, shapes, st.sampled_from(["int8", "int4"]))
def test_a_signed_value_is_off_by_half_a_step_of_its_block_at_most(seed, shape, format_):
    x = values(seed, shape)
    error = (there_and_back(x, format_, signed=True) - x).abs().reshape(-1)
    for i, part in enumerate(x.reshape(-1).split(BLOCK[format_])):
        step = max(map(abs, part.tolist()), default=0.0) / LEVELS[format_]
        # The scale is a bfloat16: 2^-9 off at most, which at the ends adds to the half step.
        most = step * (0.5 + LEVELS[format_] * 2**-8)
        assert (error[i * BLOCK[format_] :][: len(part)] <= most).all()


@given(seeds, shapes)
def test_in_two_bits_a_value_keeps_its_sign_and_the_nearer_magnitude_of_its_block(seed, shape):
    x = values(seed, shape)
    back = there_and_back(x, "int2", signed=True)
    assert (back * x >= 0).all()
    blocks = (each.reshape(-1).double().split(BLOCK["int2"]) for each in (x, back))
    for part, other in zip(*blocks, strict=True):
        if not len(part):
            continue
        sizes = other.abs().unique()
        assert len(sizes) <= 2
        error = (part - other).abs()
        assert (error <= (part.abs()[:, None] - sizes).abs().amin(dim=1) + 1e-12).all()
        # No worse than the best single magnitude; a bfloat16 is off by 2^-9.
        one = (part.abs() - part.abs().mean()).square().sum()
        assert error.square().sum() <= one + 2**-8 * part.square().sum()


@given(seeds, shapes, formats)
def test_a_second_moment_keeps_its_order_of_magnitude_and_never_becomes_zero(seed, shape, format_):
    v = values(seed, shape, spread=2.0).square() * 1e-8
    back = there_and_back(v, format_, signed=False)
    assert ((back == 0) == (v == 0)).all()
    assert (back >= 0).all()
    if format_ == "bf16":
        torch.testing.assert_close(back, v, rtol=2**-8, atol=0)
        return
    step = {"int8": 254, "int4": 14, "int2": 2}[format_]
    for part, other in zip(
        v.reshape(-1).split(BLOCK[format_]), back.reshape(-1).split(BLOCK[format_]), strict=True
    ):
        positive = part[part > 0].double()
        if len(positive):
            span = (positive.max() / positive.min()).log() + 2**-6  # the ends are bfloat16
            off = (other[part > 0].double() / positive).log().abs()
            assert (off <= span / step / 2 + 1e-4).all()


def test_the_smallest_second_moments_survive_beside_the_greatest():
    v = torch.tensor([2.0**-126, 1e-30, 1e-12, 1.0, 1e30])
    back = there_and_back(v, "int8", signed=False)
    assert (back > 0).all()
    assert ((back / v).log().abs() < 0.4).all()


# ------------------------------------------------------------------------------------ Federations


def run(name: str, compression: Mapping[str, str], folder: Any, **options: Any) -> Run:
    return Run(name, (2, 3, 5), folder, compression=compression, **options)


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("adopt", ALL_CODED),
        ("adam", ALL_CODED),
        ("adam", dict.fromkeys(ALL_CODED, "bf16")),
        ("adopt", {"exp_avg_sq": "int8"}),
        ("adam", {PARAMS: "int8"}),
        ("adam", {PARAMS: "int2", "exp_avg": "int4"}),
    ],
    ids=["adopt", "adam", "bf16", "v", "params", "two bits"],
)
def test_a_federation_of_coded_streams_is_algorithm_1_with_these_codes(name, compression, tmp_path):
    federation = run(name, compression, tmp_path)
    codes = {
        stream: partial(there_and_back, format_=format_, signed=stream != "exp_avg_sq")
        for stream, format_ in compression.items()
    }
    assert_close(federation.start(), oracle(federation, codes=codes))


def test_coded_streams_travel_both_ways_in_the_bytes_that_are_said(tmp_path):
    federation = run("adam", ALL_CODED, tmp_path)
    federation.start()
    assert federation.watch.run is not None
    sizes, compressed = federation.watch.run.stream_bytes, federation.watch.run.compressed_bytes
    assert compressed == compressed_bytes(federation.strategy.state.templates, ALL_CODED, {})
    assert all(compressed[name] < sizes[name] / 3 for name in ALL_CODED)
    due: list[str] = []
    for record in federation.watch.records[1:]:
        assert record.traffic.up == {name: 3 * compressed[name] for name in record.streams}
        down = (
            {PARAMS: sizes[PARAMS]}
            if record.start == 0
            else {name: compressed[name] for name in due}
        )
        assert record.traffic.down == {name: 3 * size for name, size in down.items()}
        due = record.streams


def test_with_an_evaluation_parameters_are_still_sent_once(tmp_path):
    with_it, without = (run("adam", ALL_CODED, tmp_path / name) for name in ("with", "without"))
    with_it.strategy.evaluate_clients, with_it.strategy.eval_every = True, 1
    assert_same(with_it.start(), without.start())
    assert without.watch.run is not None
    last = without.watch.run.compressed_bytes[PARAMS] * 3  # the last average, evaluated
    total = [sum(sum(r.traffic.down.values()) for r in x.watch.records) for x in (with_it, without)]
    assert total[0] == total[1] + last


def test_who_was_away_or_lost_its_state_has_what_the_others_have(tmp_path):
    """Client 1 is away past several averages, client 2 comes late and once loses its file."""
    away = lambda m, t: (m != 1 or not 3 <= t < 9) and (m != 2 or t >= 5)  # noqa: E731
    policy = Policy(on_failure="continue", min_clients=1)
    federation = run("adam", ALL_CODED, tmp_path, num_steps=30, present=away, policy=policy)

    def lose(record: WindowRecord) -> None:
        if record.step == 10:
            federation.files(2).delete()

    federation.watch.after.append(lose)
    states = federation.start()
    records = federation.watch.records
    assert [e.client for r in records for e in r.events if e.kind == "state lost"] == ["client-2"]
    assert not any(record.left_out for record in records)
    assert_same(states[1:], states[:1] * 2)  # at step 30 everything is due


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        ({"params": "int7"}, "params=int7: no such format; there are fp32, bf16, int8, int4"),
        ({"buffers": "int8"}, "buffers=int8: buffers are sent as fp32 only"),
        ({"exp_avg": "int8"}, r"compression of \['exp_avg'\] needs templates="),
    ],
)
def test_a_format_that_cannot_be_is_refused(compression, said):
    with pytest.raises(ValueError, match=said):
        DesLoc(SyncSchedule({PARAMS: 1, "exp_avg": 1}), 4, compression=compression)


def test_a_reply_of_other_bytes_is_left_out(tmp_path):
    policy = Policy(on_failure="continue", min_clients=1)
    federation = run("adam", ALL_CODED, tmp_path, policy=policy)

    def shorten(reply: Message) -> None:
        if PARAMS in reply.content:
            codes = from_record(reply.content.array_records[PARAMS])
            reply.content[PARAMS] = to_record({key: code[:-1] for key, code in codes.items()})

    federation.grid.on_training(shorten, node=2)
    federation.start()
    averages = [record for record in federation.watch.records if PARAMS in record.streams]
    assert averages
    assert all("bytes of int4" in record.left_out["client-1"] for record in averages)
