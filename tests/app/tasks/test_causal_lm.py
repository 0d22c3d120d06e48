"""Laws of the task: batches, tokens, the model, its measures and its files."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from configurations import with_values
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from test_text import write
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from client_app.worker import RunParts
from flower_desloc.app.config import Config, dump, load
from flower_desloc.app.tasks import Site
from flower_desloc.app.tasks.alike import required_alike
from flower_desloc.app.tasks.causal_lm import CausalLM, TextBatch, evaluation
from flower_desloc.app.tasks.causal_lm.batches import heldout_batches, random_batch
from flower_desloc.app.tasks.causal_lm.corpus import read
from flower_desloc.app.tasks.causal_lm.evaluation import measure
from flower_desloc.app.tasks.causal_lm.tokens import Tokens, load_tokenizer

LETTERS = st.text(max_size=40) | st.text("ab é€😀\n\t ", max_size=40)


def prose(seed: str, count: int = 60) -> list[str]:
    rng = random.Random(seed)
    words = [f"{seed}{'xyz'[i % 3] * (i % 5 + 1)}é" for i in range(50)]
    return [" ".join(rng.choices(words, k=40)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of unlike text."""
    path = tmp_path_factory.mktemp("text")
    for name in "abc":
        write(path / f"{name}.jsonl", prose(name))
    return path


@pytest.fixture
def config(folder: Path) -> Config:
    """Return a small model on the three domains."""
    config = Config()
    return with_values(
        config,
        {
            "data": replace(config.data, source=str(folder), seq_len=32, batch_size=4),
            "model": replace(
                config.model, hidden_size=32, intermediate_size=64, num_hidden_layers=2
            ),
            "evaluation.sequences": 10,
        },
    )


@pytest.fixture
def task(config: Config) -> CausalLM:
    return CausalLM(config)


def numbered(count: int) -> Tokens:
    return Tokens(np.arange(count), np.arange(count) % 3)


# ----------------------------------------------------------------------------------------- batches


def test_clients_that_hold_the_same_text_draw_other_windows(task, folder):
    one, other = (task.client_data(Site(i, 4, data_path=folder)) for i in range(2))
    assert not torch.equal(one.train_batch(0).tokens, other.train_batch(0).tokens)


@pytest.mark.parametrize("count", [5, 9])
def test_every_window_is_consecutive_tokens_and_all_windows_are_drawn(count):
    draw = partial(random_batch, numbered(count), seq_len=4, batch_size=8)
    batches = [draw(key=[0, 0, step]) for step in range(100)]
    for batch in batches:
        assert (batch.tokens.diff(dim=1) == 1).all()
        assert batch.num_bytes == (batch.tokens[:, 1:] % 3).sum()
    starts = torch.cat([batch.tokens[:, 0] for batch in batches])
    assert {*starts.tolist()} == {*range(count - 4)}


@given(st.integers(2, 200), st.integers(2, 9), st.integers(1, 5), st.integers(1, 12))
def test_held_out_windows_do_not_overlap_and_are_spread_evenly(
    count, seq_len, batch_size, sequences
):
    config = Config()
    config = with_values(
        config, {"data": replace(config.data, seq_len=seq_len, batch_size=batch_size)}
    )
    batches = heldout_batches(numbered(count), config, sequences)
    windows = torch.cat([batch.tokens for batch in batches])
    length = min(count, seq_len + 1)
    assert windows.shape == (min(sequences, count // length), length)
    gaps = windows[:, 0].diff()
    assert (gaps >= length).all()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= length
    assert all(len(batch.tokens) <= batch_size for batch in batches)
    assert sum(batch.num_bytes for batch in batches) == (windows[:, 1:] % 3).sum()


def test_central_evaluation_has_every_domain(config, task):
    heldout = task.heldout()
    assert list(heldout) == ["a", "b", "c"]
    for name, batches in heldout.items():
        tokens = torch.cat([batch.tokens for batch in batches])
        assert len(tokens) <= config.evaluation.sequences
        assert name in bytes(tokens[0].tolist()).decode(errors="ignore")


# ------------------------------------------------------------------------------------------ shards


def test_a_shard_says_what_it_holds(task):
    data = task.client_data(Site(1, 4))
    assert data.description.keys() == {"b"}
    assert data.num_examples == pytest.approx(data.description["b"] / 33, rel=0.05)
    assert task.client_data(Site(0, 4)).description.keys() == {"a", "b", "c"}


def test_a_site_with_data_of_its_own_has_all_of_it_and_nothing_else(config, tmp_path):
    (tmp_path / "own.txt").write_text("\n\n".join(prose("own")))
    config = with_values(config, {"data.domains": ["a"]})  # of the common source
    data = CausalLM(config).client_data(Site(3, 4, data_path=tmp_path / "own.txt"))
    assert data.description.keys() == {"own"}
    for batch in (data.train_batch(0), *data.heldout()):
        assert set(bytes(batch.tokens.flatten().tolist()).decode(errors="ignore")) <= set(
            "ownxyzé \n"
        )


def test_a_shard_shorter_than_a_sequence(config, folder, tmp_path):
    config = with_values(config, {"data.seq_len": 10**6})
    with pytest.raises(
        ValueError,
        match=r"^partition 2 of 4 \(data.partition=by_domain, .* holds \d+ tokens .* data.seq_len",
    ):
        CausalLM(config).client_data(Site(2, 4))
    with pytest.raises(ValueError, match=rf"^data-path={folder} holds \d+ tokens to train on"):
        CausalLM(config).client_data(Site(0, 1, data_path=folder))


def test_a_partition_without_a_document(config, tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", ["word " * 40])
    config = with_values(config, {"data.source": str(tmp_path)})
    task = CausalLM(config)
    assert task.client_data(Site(1, 2)).description.keys() == {"b"}
    with pytest.raises(ValueError, match=r"only 2 documents .* 4 clients; use fewer clients"):
        task.client_data(Site(3, 4))
    write(tmp_path / "c.jsonl", prose("c"))
    task = CausalLM(replace(config, data=replace(config.data, domains=["a", "b", "c"])))
    with pytest.raises(ValueError, match=r"^partition 4 of 6 .* holds 0 tokens to train on"):
        task.client_data(Site(4, 6))


# ------------------------------------------------------------------------------------------ tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the names of tokenizers in files."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "byte_level": (
            tokenizers.ByteLevelBPETokenizer(add_prefix_space=True),
            {"special_tokens": ["</s>"]},
        ),
        "no_end": (tokenizers.ByteLevelBPETokenizer(), {}),
        "word_piece": (tokenizers.BertWordPieceTokenizer(), {}),  # drops blanks and accents
        "unigram": (
            tokenizers.SentencePieceUnigramTokenizer(),
            {"special_tokens": ["<unk>"], "unk_token": "<unk>"},
        ),
    }
    path = tmp_path_factory.mktemp("tokenizers")
    for name, (tokenizer, options) in kinds.items():
        tokenizer.train_from_iterator(prose("a"), vocab_size=300, show_progress=False, **options)
        tokenizer.save(str(path / f"{name}.json"))
    return {name: str(path / f"{name}.json") for name in kinds}


def test_a_site_with_other_tokens_is_turned_away(files, tmp_path):
    ours, path = Path(files["byte_level"]).read_text(), tmp_path / "tokenizer.json"

    def parts(text: str) -> RunParts:
        path.write_text(text)
        load_tokenizer.cache_clear()
        return RunParts(dump(config), alike, torch.device("cpu"))

    config = load("quickstart", [f"data.tokenizer={path}"])
    alike: dict[str, str] = {}
    task = parts(ours).task
    alike = required_alike(task, task.build_model())
    parts(ours).build_model()
    content = json.loads(ours)
    tokens = content["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]  # as many tokens as before
    with pytest.raises(ValueError, match=r"^the tokens of task=causal_lm differ from the server's"):
        parts(json.dumps(content)).build_model()


@pytest.mark.parametrize("name", ["bytes", "byte_level", "no_end", "word_piece", "unigram"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(files, name):
    tokenizer = load_tokenizer(files.get(name, name))
    joined = "" if tokenizer.eos_id is not None else "\n\n"

    @given(st.lists(LETTERS.map("é{}.".format), min_size=1, max_size=5))
    def law(documents):
        tokens = tokenizer.encode(documents)
        assert tokens.ids.shape == tokens.num_bytes.shape
        assert tokens.num_bytes.sum() == len(joined.join(documents).encode())
        assert len(tokens) == 0 or tokens.ids.max() < tokenizer.vocab_size

    law()


def test_the_end_of_text_token_ends_every_document(files):
    tokenizer = load_tokenizer(files["byte_level"])
    tokens = tokenizer.encode(["one", "two", "three"])
    ends = tokens.ids == tokenizer.eos_id
    assert ends.sum() == 3
    assert ends[-1]
    assert (tokens.num_bytes[ends] == 0).all()


@pytest.mark.parametrize("name", ["bytes", "byte_level", "word_piece", "unigram"])
def test_a_saved_tokenizer_is_loaded_by_name_of_its_folder(files, name, tmp_path):
    ours = load_tokenizer(files.get(name, name))
    ours.save(tmp_path)
    text = "axx ayé, b\nz"
    theirs = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"]
    again = load_tokenizer(str(tmp_path))
    assert [i for i in ours.encode([text]).ids if i != ours.eos_id] == theirs
    assert again.encode([text]).ids.tolist() == ours.encode([text]).ids.tolist()
    assert (again.eos_id, again.vocab_size) == (ours.eos_id, ours.vocab_size)


# ------------------------------------------------------------------------------------------- model


def test_the_weights_start_with_the_papers_deviation(config):
    config = with_values(config, {"model": replace(config.model, hidden_size=64)})
    model: Any = CausalLM(config).build_model()
    matrix = model.model.layers[0].mlp.up_proj.weight
    assert matrix.std().item() == pytest.approx(1 / math.sqrt(64), rel=0.05)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "qwen3", "gpt_neox", "bert", "falcon", "opt", "git"]
)
def test_no_architecture_sees_the_future_or_drops_anything_out(config, name):
    config = with_values(config, {"model.type": name})
    model = CausalLM(config).build_model().train()
    tokens = torch.arange(32)[None]
    changed = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], dim=1)
    logits, others = (model(input_ids=t, use_cache=False).logits for t in (tokens, changed))
    assert logits.shape == (1, 32, 256)
    torch.testing.assert_close(logits[:, :-1], others[:, :-1])
    assert not torch.equal(logits[:, -1], others[:, -1])


def test_a_model_that_sees_the_future_is_refused(config):
    config = with_values(config, {"model": replace(config.model, type="cpmant")})
    with pytest.raises(ValueError, match=r"^model\.type=cpmant: it is not causal"):
        CausalLM(config).build_model()


@pytest.mark.parametrize(
    ("name", "error"),
    [("roberta", "TypeError"), ("xlm", "AttributeError"), ("gptj", "RuntimeError")],
)
def test_a_model_whose_first_pass_fails_is_refused_with_the_way_round(config, name, error):
    config = with_values(config, {"model": replace(config.model, type=name)})
    with pytest.raises(
        ValueError, match=rf"^model\.type={name}: .*{error}.*model\.config"
    ) as caught:
        CausalLM(config).build_model()
    assert "\n" not in str(caught.value)


def test_checking_a_model_changes_neither_its_tensors_nor_the_random_numbers(config, monkeypatch):
    config = with_values(config, {"model": replace(config.model, type="phimoe")})
    before = torch.get_rng_state()
    checked = CausalLM(config).build_model()
    monkeypatch.setattr("flower_desloc.app.tasks.causal_lm.model.probe", lambda *_, **__: None)
    unchecked = CausalLM(config).build_model()
    assert torch.equal(torch.get_rng_state(), before)
    assert checked.training == unchecked.training
    for name, tensor in unchecked.state_dict().items():
        assert torch.equal(checked.state_dict()[name], tensor)


MOE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "output_router_logits": True,
    "router_aux_loss_coef": 10.0, "num_local_experts": 4,
}  # fmt: skip


def test_the_terms_that_an_architecture_adds_are_in_the_trained_loss_only(config):
    """Compared with the loss of transformers itself."""
    config = with_values(config, {"model": replace(config.model, type="mixtral", config=MOE)})
    task = CausalLM(config)
    model = task.build_model()
    tokens = torch.arange(66).view(2, 33) * 7 % 256
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    loss = task.loss(model, TextBatch(tokens, 64))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    theirs = CausalLM(config).build_model()
    del theirs._loss_function
    own = theirs(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
    own.loss.backward()
    assert loss.item() == pytest.approx(own.loss.item(), rel=1e-6)
    assert own.aux_loss > 0
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    entropy = loss - MOE["router_aux_loss_coef"] * own.aux_loss
    nats = task.evaluate(model, [TextBatch(tokens, 64)])["nats"]
    assert nats / 64 == pytest.approx(entropy.item(), rel=1e-4)


def test_a_term_that_the_task_cannot_compute_is_refused(config, monkeypatch):
    """Such as of a model that computes its cross entropy itself."""

    def forward(self, input_ids, labels=None, **_):
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        loss = None if labels is None else functional.cross_entropy(logits.mT, labels) + 1
        return SimpleNamespace(logits=logits, loss=loss)

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", forward)
    with pytest.raises(ValueError, match=r"^model\.type=llama: it adds terms to its loss"):
        CausalLM(config).build_model()


def test_the_model_has_the_shape_the_configuration_states(config):
    config = with_values(config, {"model.rope_theta": 500.0})
    built: Any = CausalLM(config).build_model().config
    assert (built.hidden_size, built.intermediate_size, built.num_hidden_layers) == (32, 64, 2)
    assert built.rope_parameters["rope_theta"] == 500.0
    assert built.max_position_embeddings >= config.data.seq_len


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("data.tokenizer", "no/such.json", "there is no such file$"),
        ("data.tokenizer", ".", "neither `bytes`, nor a tokenizer.j"),
        ("data.tokenizer", "broken.json", "neither `bytes`, nor"),
        ("model.type", "lama", "must be a causal .* such as llama"),
        ("model.type", "t5", "must be a causal language model"),
        ("model.type", "gpt_neo", "transformers cannot build it"),
    ],
)
def test_a_model_that_cannot_be_is_an_error_that_names_the_setting(
    config, tmp_path, monkeypatch, setting, value, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    config = with_values(config, {setting: value})
    with pytest.raises(ValueError, match=rf"^{setting}={value}: {message}"):
        CausalLM(config).build_model()


# ---------------------------------------------------------------------------------------- measures


class Fixed(nn.Module):
    """Predicts the same logits everywhere."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_the_measures_are_those_worked_out_by_hand(task):
    # p = (1/2, 1/4, 1/4); predicted are 0, 0 and 1, 2, which stand for 5 + 3 bytes of text.
    model = Fixed(torch.tensor([0.5, 0.25, 0.25]).log())
    batches = [TextBatch(torch.tensor([[2, 0, 0]]), 5), TextBatch(torch.tensor([[0, 1, 2]]), 3)]
    sums = task.evaluate(model, batches)
    nats = 2 * math.log(2) + 2 * math.log(4)
    assert sums == {"nats": pytest.approx(nats), "tokens": 4, "bytes": 8}
    metrics = task.metrics(sums)
    assert metrics["loss"] == pytest.approx(nats / 4)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / 4))
    assert metrics["nats_per_byte"] == pytest.approx(nats / 8)
    assert metrics["bits_per_byte"] == pytest.approx(6 / 8)


def test_the_activation_norm_is_that_of_what_the_last_block_hands_to_the_final_norm(task):
    model = task.build_model()
    (batch, *_) = task.heldout()["b"]
    handed: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: handed.append(inputs[0]))
    metrics = task.metrics(task.evaluate(model, [batch]))
    assert metrics["activation_norm"] == pytest.approx(float(handed[0].norm(dim=-1).mean()))


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "granite", "bert", "opt", "openai-gpt", "hrm_text", "trocr"],
)
@torch.no_grad()
def test_the_nats_of_some_positions_at_a_time_are_those_of_all(config, name, monkeypatch):
    """Logits may be capped or scaled, blocks run again (hrm_text), a head take all (trocr)."""
    config = with_values(config, {"model": replace(config.model, type=name, dtype="float64")})
    model = CausalLM(config).build_model().eval()
    tokens = torch.arange(66).view(2, 33) % 50
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    nats = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    whole, norms = measure(model, tokens)
    assert whole == nats.item()
    monkeypatch.setattr(evaluation, "_VALUES", 2 * 256 * 5)
    forward = model.forward
    parts, same = measure(model, tokens)
    assert parts == pytest.approx(whole, rel=1e-12)
    assert same == norms
    assert model.forward == forward


def test_a_diverged_model_has_an_infinite_perplexity(task):
    assert task.metrics({"nats": 1e6, "tokens": 1.0, "bytes": 1.0})["perplexity"] == math.inf
    assert math.isnan(task.metrics({"nats": math.nan, "tokens": 1.0, "bytes": 1.0})["perplexity"])


def test_half_precision_is_measured_in_single(task):
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = TextBatch(torch.arange(200)[None], 199)
    loss = task.loss(Fixed(logits), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(task.loss(Fixed(logits.double()), batch).item())


def test_a_batch_goes_to_where_the_model_is(task):
    model = Fixed(torch.zeros(256, device="meta"))
    assert task.loss(model, task.client_data(Site(0, 1)).train_batch(0)).device.type == "meta"


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_saved_without_a_word_is_loaded_by_transformers_with_equal_weights(
    config, tmp_path, capfd, tied, dtype
):
    config = with_values(
        config, {"model": replace(config.model, tie_word_embeddings=tied, dtype=dtype)}
    )
    task = CausalLM(config)
    model: Any = task.build_model()
    task.save(model, tmp_path / "final")
    assert capfd.readouterr() == ("", "")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    with safe_open(tmp_path / "final" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_a_saved_model_with_subwords_brings_its_tokenizer(config, files, tmp_path):
    config = with_values(config, {"data.tokenizer": files["byte_level"]})
    task = CausalLM(config)
    model: Any = task.build_model()
    vocab_size = load_tokenizer(files["byte_level"]).vocab_size
    assert model.get_input_embeddings().num_embeddings == vocab_size
    sums = task.evaluate(model, task.heldout()["a"])
    assert sums["bytes"] > sums["tokens"]
    task.save(model, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "</s>"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.eos_token_id == 0


def test_the_text_is_read_once_a_process(task):
    task.client_data(Site(0, 4))
    misses = read.cache_info().misses
    task.client_data(Site(3, 4))
    task.heldout()
    assert read.cache_info().misses == misses
