"""Laws of E_m: the mean over clients, and their drift around it."""

import gc
import math
import weakref
from dataclasses import asdict

import pytest
import torch
from federation import assert_same, draw, generator
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import Drift, Mean
from flower_desloc.core.averaging import distance

WEIGHTS = st.lists(st.floats(0.01, 1000), min_size=1, max_size=7)


def client(m, dtype=torch.float64):
    """Two streams of odd shapes, a scalar and an empty tensor among them."""
    return {
        name: {key: tensor.to(dtype) for key, tensor in draw(seed, m).items()}
        for seed, name in enumerate(("params", "exp_avg"))
    }


def mean_of(clients, weights=None, reference=None):
    mean = Mean(reference)
    for m, streams in enumerate(clients):
        if weights is None:
            mean.add(streams)
        else:
            mean.add(streams, weights[m])
    return mean


def large(m, size=3 * 4096 + 17):
    """More than a row and no whole number of them."""
    return torch.randn(size, generator=generator(7, m))


def stacked(clients, name, key):
    return torch.stack([streams[name][key] for streams in clients])


# -------------------------------------------------------------------------------------------- Mean


@given(WEIGHTS)
def test_the_mean_is_the_weighted_mean_of_every_tensor_of_every_stream(weights):
    clients = [client(m) for m in range(len(weights))]
    result = mean_of(clients, weights).result()
    w = torch.tensor(weights, dtype=torch.float64)
    assert result.keys() == clients[0].keys()
    for name, stream in result.items():
        assert stream.keys() == clients[0][name].keys()
        for key, got in stream.items():
            expected = torch.tensordot(w, stacked(clients, name, key), dims=1) / w.sum()
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_fp32_and_returned_as_it_came(dtype):
    clients = [client(m, dtype) for m in range(50)]
    for name, stream in mean_of(clients).result().items():
        for key, got in stream.items():
            expected = stacked(clients, name, key).double().mean(dim=0)
            torch.testing.assert_close(got, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    # In half precision itself a sum of ones stops growing: at 256 in bf16, at 2048 in fp16.
    ones = [{"params": {"a": torch.ones(3, dtype=dtype)}}] * 5000
    assert torch.equal(mean_of(ones).result()["params"]["a"], torch.ones(3, dtype=dtype))


def test_adding_neither_changes_nor_keeps_what_was_added():
    streams, twin = client(0), client(0)
    mean = mean_of([streams, client(1)])
    assert_same(streams, twin)
    kept = [weakref.ref(tensor) for stream in streams.values() for tensor in stream.values()]
    del streams
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    assert mean.count == 2


def test_a_result_does_not_change_when_more_is_added():
    mean = mean_of([client(0)])
    first = mean.result()
    mean.add(client(1))
    assert_same(first, client(0))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight):
    mean = mean_of([client(0)])
    with pytest.raises(ValueError, match=f"positive and finite, got {weight}"):
        mean.add(client(1), weight)
    assert_same(mean.result(), client(0))


def test_the_mean_of_nobody_is_refused():
    with pytest.raises(ValueError, match="no client"):
        Mean().result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("exp_avg"), r"streams are \['params'\], expected \['exp_avg', 'params'\]"),
        (lambda s: s.update(exp_avg_sq=s["params"]), "'exp_avg_sq'"),
        (lambda s: s["exp_avg"].pop("scalar"), "tensors of 'exp_avg' are"),
        (lambda s: s["exp_avg"].update(more=torch.zeros(1)), "'more'"),
        (
            lambda s: s["params"].update(scalar=torch.zeros(1)),
            r"'scalar' of stream 'params' has shape \(1,\), expected \(\)",
        ),
        (lambda s: s["params"].update(matrix=torch.zeros(5, 3)), r"shape \(5, 3\), .* \(3, 5\)"),
    ],
)
def test_other_names_or_shapes_than_the_first_clients_are_refused(change, message):
    mean, other = mean_of([client(0)]), client(1)
    change(other)
    with pytest.raises(ValueError, match=message):
        mean.add(other)
    assert_same(mean.result(), client(0))
    assert mean.count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_large_tensor_is_averaged_as_its_pieces_contiguous_or_not(dtype):
    weights, size = [1.0, 2.5, 1 / 3], (1 << 19) + 70_001
    whole = [large(m, 2 * size)[::2].to(dtype) for m in range(3)]
    pieces = [[{"params": {"a": p}} for p in x.split(300_000)] for x in whole]
    got = mean_of([{"params": {"a": x}} for x in whole], weights)
    means = [mean_of(clients, weights) for clients in zip(*pieces, strict=True)]
    expected = torch.cat([mean.result()["params"]["a"] for mean in means])
    assert torch.equal(got.result()["params"]["a"], expected)
    drift, *parts = (asdict(mean.drift(mean.result())["params"]) for mean in (got, *means))
    norms = {figure: math.hypot(*(part[figure] for part in parts)) for figure in drift}
    assert drift == pytest.approx(norms, rel=1e-6)


def test_neither_mean_nor_drift_depends_on_the_number_of_threads():
    def after(threads):
        torch.set_num_threads(threads)
        try:
            mean = mean_of([{"params": {"a": large(m, (1 << 20) + 40_001)}} for m in range(3)])
            assert torch.get_num_threads() == threads
            return mean.result()["params"]["a"], mean.drift(mean.result())
        finally:
            torch.set_num_threads(1)

    (one, drift), (several, other) = after(1), after(3)
    assert torch.equal(one, several)
    assert drift == other


# ------------------------------------------------------------------------------------------- Drift


def two_pass(clients, weights, reference):
    """Drift by its definition: the mean first, then the distances to it."""
    W = sum(weights)
    drifts = {}
    for name in clients[0]:
        s = [torch.cat([t.double().flatten() for t in c[name].values()]) for c in clients]
        mean = sum(w * s_m for w, s_m in zip(weights, s, strict=True)) / W
        spread = sum(w * (s_m - mean).square().sum() for w, s_m in zip(weights, s, strict=True)) / W
        r = torch.zeros_like(mean)
        if reference is not None:
            r = torch.cat([t.double().flatten() for t in reference[name].values()])
        drifts[name] = Drift(float(spread.sqrt()), float((mean - r).norm()), float(mean.norm()))
    return drifts


@pytest.mark.parametrize("reference", [None, client(99)], ids=["from_zero", "from_reference"])
@given(weights=WEIGHTS.filter(lambda weights: len(weights) > 1))
def test_drift_is_the_two_pass_formula(reference, weights):
    clients = [client(m) for m in range(len(weights))]
    mean = mean_of(clients, weights, reference)
    got, expected = mean.drift(mean.result()), two_pass(clients, weights, reference)
    for name, drift in expected.items():
        assert asdict(got[name]) == pytest.approx(asdict(drift), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reference", [None, client(99)], ids=["from_zero", "from_reference"])
@given(weights=WEIGHTS)
def test_equal_clients_are_their_mean_bit_for_bit_and_do_not_drift(reference, dtype, weights):
    same = client(0, dtype)
    mean = mean_of([same] * len(weights), weights, reference)
    assert_same(mean.result(), same)
    assert {drift.spread for drift in mean.drift(mean.result()).values()} == {0.0}


@pytest.mark.parametrize("size", [1e-43, 1e-30, 1e-22, 1e-16, 1e-9, 1e9, 1e21, 1e37])
def test_drift_of_fp32_neither_overflows_nor_underflows(size):
    """Squares of these are beyond fp32, on one side or the other."""
    clients = [{"params": {"a": large(m).double().mul(size).float()}} for m in range(3)]
    mean = mean_of(clients, reference=clients[0])
    (got,) = mean.drift(mean.result()).values()
    (expected,) = two_pass(clients, [1.0] * 3, clients[0]).values()
    exact = 1e-5 if size > 1e-37 else 0.3  # of the last there is little more than zero and one
    assert asdict(got) == pytest.approx(asdict(expected), rel=exact, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_distance_is_that_of_the_exact_values_in_any_type(dtype):
    # The difference of the last pair has more digits than half precision.
    here, there = (
        {"a": large(m, 3 << 18).to(dtype), "b": torch.full((9,), value, dtype=dtype)}
        for m, value in ((0, 1e4), (1, 3.0))
    )
    for origin in (None, there):
        exact = [here[key].double() - (origin[key].double() if origin else 0) for key in here]
        expected = math.sqrt(sum(float(tensor.square().sum()) for tensor in exact))
        assert distance(here, origin) == pytest.approx(expected, rel=1e-6)
