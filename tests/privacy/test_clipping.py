"""Sums of clipped gradients: against a loop over the examples, and their sensitivity."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

pytest.importorskip("opacus")

from flower_desloc.app.config import ConfigError, load
from flower_desloc.core.streams import parameters
from flower_desloc.privacy.clipping import LEAST_NORM, clipped_sum, require_independent

C = 0.5


def loss(module, tokens):
    """Return the loss of a causal language model, or of rows of numbers."""
    if tokens.is_floating_point():
        return module(tokens).square().mean()
    logits = module(input_ids=tokens[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def language_model():
    """Return a tiny Llama with tied embeddings, grouped heads, RMSNorm and rotary embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).train()


def looped(module, batch, bound):
    """Return the sum of clipped gradients, one backward pass after the other."""
    params = parameters(module)
    total = {key: torch.zeros_like(p) for key, p in params.items()}
    for row in batch:
        module.zero_grad(set_to_none=False)
        loss(module, row[None]).backward()
        grads = {key: p.grad for key, p in params.items() if p.grad is not None}
        for key, grad in grads.items():
            total[key] += grad * min(1.0, bound / norm(grads))
    return total


def summed(module, batch, bound=C):
    return clipped_sum(loss, module, parameters(module), batch.split(1), max_grad_norm=bound)


def norm(tree):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tree.values()))


def minus(a, b):
    return {key: a[key] - b[key] for key in a}


@pytest.mark.parametrize("bound", [0.5, 3.0, math.inf])
def test_it_is_the_sum_of_a_loop_over_the_examples(bound):
    module, batch = language_model(), torch.randint(20, (5, 9))
    ours, theirs = summed(module, batch, bound), looped(module, batch, bound)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key].float(), tensor, rtol=1e-4, atol=1e-6, msg=key)


def test_without_a_bound_it_is_the_gradient_of_the_sum():
    module, batch = language_model(), torch.randint(20, (4, 9))
    (len(batch) * loss(module, batch)).backward()
    for key, tensor in summed(module, batch, math.inf).items():
        torch.testing.assert_close(
            tensor.float(), parameters(module)[key].grad, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("seed", range(5))
def test_an_example_more_changes_it_by_at_most_the_bound_and_another_one_by_twice_that(seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    batch, kinds = torch.randn(6, 4), [0.0, 1.0, 1e4, 1e30, math.nan, math.inf]
    alone = summed(module, batch)
    sums = [summed(module, torch.cat([batch, scale * torch.ones(1, 4)])) for scale in kinds]
    for each in sums:
        assert norm(minus(each, alone)) <= C * (1 + 1e-5)
    for one, other in pairwise(sums):
        assert norm(minus(one, other)) <= 2 * C * (1 + 1e-5)


def test_a_bound_close_to_the_least_numbers_of_single_precision_is_refused():
    module, batch = nn.Linear(4, 1, bias=False), torch.rand(3, 4)
    with pytest.raises(ValueError, match="max_grad_norm=1e-07: must be at least 1e-06"):
        summed(module, batch, 1e-7)
    with pytest.raises(ConfigError, match=r"privacy\.max_grad_norm"):
        load("digits", "privacy.max_grad_norm=1e-7")
    load("digits", f"privacy.max_grad_norm={LEAST_NORM}")


def test_norms_of_half_precision_are_those_of_wider_numbers():
    module = nn.Linear(90_000, 1, bias=False).half()
    batch = torch.full((1, 90_000), 1e-3, dtype=torch.float16)

    def linear(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).sum()

    kept = clipped_sum(linear, module, parameters(module), [batch], max_grad_norm=0.1)
    assert norm(kept) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_of_any_type_an_example_more_among_thousands_changes_it_by_at_most_the_bound(kind):
    module, batch = nn.Linear(2, 1, bias=False).to(kind), torch.ones(3000, 2, dtype=kind)

    def mean(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).mean()

    def summed_over(number):
        params, rows = parameters(module), batch[:number].split(1)
        return clipped_sum(mean, module, params, rows, max_grad_norm=0.1)

    assert norm(minus(summed_over(3000), summed_over(2999))) <= 0.1 * (1 + 1e-6)


def test_an_example_that_is_not_finite_counts_as_none():
    module, batch = nn.Linear(4, 2), torch.randn(3, 4)
    spoiled = torch.cat([batch, torch.full((1, 4), math.nan)])
    assert norm(minus(summed(module, spoiled), summed(module, batch))) < 1e-6


def test_batches_of_no_one_and_equal_examples():
    module, row = nn.Linear(4, 2), 10 * torch.ones(1, 4)  # its gradient is longer than the bound
    one = summed(module, row)
    assert norm(clipped_sum(loss, module, parameters(module), [], max_grad_norm=C)) == 0
    assert norm(one) == pytest.approx(C)
    twice = summed(module, row.repeat(3, 1))
    assert norm(minus(twice, {key: 3 * t for key, t in one.items()})) < 1e-6


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "InstanceNorm1d"),
    ],
)
def test_a_module_with_statistics_over_examples_is_refused_by_name(part, kind):
    module = nn.Sequential()
    module.add_module("stem", nn.Sequential(nn.Linear(4, 4), part))
    with pytest.raises(ValueError, match=rf"module 'stem.1' is a {kind}, .* use a GroupNorm"):
        require_independent(module)
    require_independent(nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4)))


class Branching(nn.Module):
    """What it does depends on its input's values."""

    def forward(self, x):
        return 2 * x if float(x.detach().sum()) > 0 else x


def test_a_module_may_branch_on_its_input():
    module, batch = nn.Sequential(nn.Linear(4, 4), Branching()), torch.randn(5, 4)
    for key, tensor in looped(module, batch, C).items():
        torch.testing.assert_close(summed(module, batch)[key].float(), tensor)


class Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError(f"cannot take {x}")


def test_a_module_that_fails_is_refused_by_name_and_its_error_not_told():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Failing()))
    with pytest.raises(ValueError, match=r"through the module '1.1' \(Failing\): RuntimeError$"):
        summed(module, torch.randn(3, 4))


class Reversible(torch.autograd.Function):
    """Its backward pass adds to the parameters' gradients itself, as transformers' Reformer's."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.requires_grad_()
            torch.autograd.backward(ctx.module(x), grad)
        return x.grad, None


class OfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return Reversible.apply(x, self.inner)


def test_gradients_that_a_module_computes_itself_are_refused():
    module = nn.Sequential(nn.Linear(4, 4), OfItsOwn())
    with pytest.raises(ValueError, match=r"adds to the gradient of '1.inner.weight' itself"):
        summed(module, torch.randn(3, 4))
    assert all(p.grad is None for p in module.parameters())


def test_embeddings_that_change_the_rows_of_an_example_are_refused():
    with pytest.raises(ValueError, match=r"module '0' is a Embedding with max_norm"):
        require_independent(nn.Sequential(nn.Embedding(10, 4, max_norm=1.0)))


@pytest.mark.parametrize("seed", range(4))
def test_rounding_cannot_make_an_example_weigh_more_than_the_bound(seed):
    """Of parameters that cancel and then amplify, rounding decides the gradients."""
    torch.manual_seed(seed)
    cancels, amplifies = nn.Linear(1000, 10, bias=False), nn.Linear(10, 2, bias=False)
    module = nn.Sequential(cancels, nn.ReLU(), amplifies)
    weight, rows = torch.randn(1, 500).expand(10, -1), 1 + 0.1 * torch.randn(20, 500)
    with torch.no_grad():
        cancels.weight.copy_(torch.cat([weight, -weight], 1) * 1e3)
        amplifies.weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 10) * 1e6)
    batch = torch.cat([rows, rows], 1)

    def first(module, batch):
        return -module(batch).log_softmax(1)[:, 0].mean()

    def summed_over(rows):
        params = parameters(module)
        return clipped_sum(first, module, params, rows.split(1), max_grad_norm=1.0)

    alone = [summed_over(row[None]) for row in batch]
    assert sum(norm(each) > 0.9 for each in alone) > 2
    for number in (1, 4, 16, 20):
        together = summed_over(batch[:number])
        for key, tensor in together.items():
            expected = torch.stack([each[key] for each in alone[:number]]).sum(0)
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
