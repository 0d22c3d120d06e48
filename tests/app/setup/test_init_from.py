"""A run that starts from a model of transformers."""

import json
import shutil
from typing import Any

import pytest
import tiny
import torch
import transformers
from tiny import summary
from transformers import AutoModelForCausalLM

from flower_desloc.app.config import ConfigError, dump, load, parse
from flower_desloc.app.setup.initial import initial, is_pretrained, with_init_from
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm.tokens import ByteTokenizer
from flower_desloc.core.schedule import PARAMS

SMALL = [
    *(*tiny.TINY, "data.domains=[docs,code]", "data.seq_len=64", "simulation.num_clients=2"),
    *("run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=6"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny.train(tmp_path_factory.mktemp("run"), *SMALL)


def edit(file, **changes):
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def renumber(tokenizer, number, to):
    """Write a tokenizer's file with other numbers for its pieces."""
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {piece: number(i) for piece, i in vocab.items()}
    for token in content["added_tokens"]:
        token["id"] = number(token["id"])
    to.write_text(json.dumps(content))


SMALLEST = {
    "vocab_size": 260, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA = {"intermediate_size": 40, "num_key_value_heads": 2}


def a_model(folder, kind, tokenizer=True, **settings):
    """Write a model of transformers' own making; return it."""
    config = transformers.AutoConfig.for_model(kind, **SMALLEST | LLAMA | settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="20KB")
    if tokenizer:
        ByteTokenizer().save(folder)
    return model.eval()


def config_for(folder, *overrides):
    return load("quickstart", [*SMALL, f"run.init_from={folder}", *overrides])


def assert_refused(said, call, config):
    with pytest.raises(ConfigError, match=said):
        call(config)


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True)], ids=str
)
def test_a_client_builds_the_servers_model_without_the_folder(kind, tied, tmp_path):
    theirs = a_model(tmp_path / "model", kind, tie_word_embeddings=tied)
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
    config = with_init_from(config_for(tmp_path / "model", "model.dtype=float64"))
    begun: Any = initial(config)
    shutil.rmtree(tmp_path / "model")
    ours = build_task(parse(dump(config))).build_model()
    assert begun.keys() == {PARAMS}
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            tensor.copy_(begun[PARAMS].pop(name))
    assert not begun[PARAMS]
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    tokens = torch.arange(32)[None]
    # Training mode: dropout is zero.
    assert torch.equal(ours.train()(tokens).logits, theirs.double()(tokens).logits)
    assert config.data.tokenizer == "bytes"


def test_a_run_that_begins_with_the_model_of_another_begins_with_its_loss(run, tmp_path):
    start = f"run.init_from={run / 'final'}"
    begun = tiny.train(tmp_path, *SMALL, start, "run.steps=2", "model.hidden_size=64")
    before, after = (summary(f)["evaluation"]["central"]["loss"] for f in (run, begun))
    assert after["first"] == before["final"]
    assert AutoModelForCausalLM.from_pretrained(begun / "final").config.hidden_size == 32
    config = parse((begun / "config.yaml").read_text())
    assert config.model.config["hidden_size"] == 32
    assert config.data.tokenizer == "bytes"
    said = (begun / "final" / "README.md").read_text()
    assert "| initial weights | local files |" in said
    assert "base_model" not in said


def test_weights_that_cannot_be_trusted_or_are_not_whole_are_refused(tmp_path):
    theirs = a_model(tmp_path, "llama")
    config = with_init_from(config_for(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("*.safetensors"))
    kept = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={name: file for name, file in kept.items() if file != shards[0].name})
    assert_refused(r"its weights lack model\.\S+, .* in all", initial, config)
    edit(index, weight_map=kept)
    own = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    own["model.norm.weight"][3] = float("nan")
    theirs.save_pretrained(tmp_path / "nan", state_dict=own)
    ByteTokenizer().save(tmp_path / "nan")
    said = r"run\.init_from=.*/nan: its weights contain NaN"
    assert_refused(said, initial, with_init_from(config_for(tmp_path / "nan")))
    edit(tmp_path / "nan" / "config.json", intermediate_size=48)
    said = r"of other shapes than its config\.json states"
    assert_refused(said, initial, with_init_from(config_for(tmp_path / "nan")))
    shards[0].write_bytes(shards[0].read_bytes()[:100])
    assert_refused("cannot read its weights, safetensors", initial, config)
    for file in (index, *shards):
        file.unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert_refused("cannot read its weights, safetensors", initial, config)


def test_a_model_and_data_that_do_not_go_together_are_refused(tmp_path):
    def refuses(said, folder, *overrides):
        assert_refused(said, with_init_from, config_for(tmp_path / folder, *overrides))

    a_model(tmp_path / "bare", "llama", tokenizer=False)
    refuses(r"it has no tokenizer; set data\.tokenizer", "bare")
    a_model(tmp_path / "empty", "gpt2", tokenizer=False)
    refuses(r"it has no tokenizer; set data\.tokenizer", "empty")
    a_model(tmp_path / "model", "gpt2")
    refuses(r"data\.seq_len=65: the model takes at most 64 tokens", "model", "data.seq_len=65")
    other = tmp_path / "other.json"
    renumber(tmp_path / "model" / "tokenizer.json", lambda i: (i + 1) % 256, to=other)
    refuses("has other numbers for the same text", "model", f"data.tokenizer={other}")
    a_model(tmp_path / "few", "llama", vocab_size=200)
    refuses("it has 256 tokens, the model 200", "few")
    images = load("digits", [f"run.init_from={tmp_path / 'model'}"])
    assert_refused("a model of transformers is for task=causal_lm", with_init_from, images)
    edit(tmp_path / "few" / "config.json", model_type="bert", architectures=["BertForMaskedLM"])
    refuses("BertForMaskedLM is not a causal language model", "few")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}')
    refuses("vit is not a causal language model", "model")


def test_a_tokenizer_of_its_own_goes_with_a_model(tmp_path):
    a_model(tmp_path, "llama", vocab_size=300)
    file = tmp_path / "tokenizer.json"
    renumber(file, lambda i: i + 3, to=file)
    assert with_init_from(config_for(tmp_path)).data.tokenizer == str(tmp_path)
    stated = with_init_from(config_for(tmp_path, f"data.tokenizer={file}"))
    assert stated.data.tokenizer == str(file)


def test_a_folder_a_name_and_a_run_are_told_apart(run):
    assert is_pretrained(str(run / "final"))
    assert is_pretrained("HuggingFaceTB/SmolLM2-135M")
    assert is_pretrained("gpt2")
    checkpoint = next(run.glob("checkpoints/*"))
    for name in (run, checkpoint, "./gpt2", "/no/such", "runs/a/checkpoints/step-1.safetensors"):
        assert not is_pretrained(str(name))
