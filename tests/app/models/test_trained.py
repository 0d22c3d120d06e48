"""Exporting, evaluating and generating from a run's model; starting a run from a model."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from command import accepted, desloc, refused
from configurations import with_values
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny import summary
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_desloc.app.config import ConfigError, dump, load, parse
from flower_desloc.app.models.card import card
from flower_desloc.app.models.export import export
from flower_desloc.app.setup.initial import initial, is_pretrained, with_init_from
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm.tokens import ByteTokenizer
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import digest
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints

SMALL = [
    *(*tiny.TINY, "data.domains=[docs,code]", "data.seq_len=64", "simulation.num_clients=2"),
    *("run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=6"),
]


def train(output_dir, *overrides):
    return tiny.train(output_dir, *SMALL, *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that a test may harm."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def model(run):
    return export(run, run.parent / "model")


def hashed(folder):
    return digest(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


def edit(file, **changes):
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def renumber(tokenizer, number, to):
    """Write a tokenizer's file with other numbers for its pieces."""
    content = json.loads(tokenizer.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {piece: number(i) for piece, i in vocab.items()}
    to.write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------ export


def test_an_exported_model_has_the_weights_and_the_loss_of_its_run(run, model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert hashed(model) == summary(run)["weights_sha256"]
    task = build_task(parse((run / "config.yaml").read_text()))
    parts = [task.evaluate(loaded, batches) for batches in task.heldout().values()]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    said = summary(run)["evaluation"]["central"]["loss"]["final"]
    assert task.metrics(totals)["loss"] == said
    text = "naïve, 你好\n"
    assert AutoTokenizer.from_pretrained(model).encode(text) == list(text.encode())


def test_a_run_that_was_cut_off_is_exported_from_its_last_checkpoint(copy, run, tmp_path):
    shutil.rmtree(copy / "final")
    (copy / "summary.json").unlink()
    assert export(copy) == copy / "export"
    assert hashed(copy / "export") == summary(run)["weights_sha256"]  # the last is the end's
    first, last = sorted(copy.glob("checkpoints/*"))
    export(first, tmp_path / "first")
    assert hashed(tmp_path / "first") != summary(run)["weights_sha256"]
    said = (tmp_path / "first" / "README.md").read_text()
    assert "| local steps | 4 of 6 |" in said
    assert hashed(tmp_path / "first") in said
    [loss] = [line for line in said.splitlines() if line.startswith("| on the server | loss |")]
    assert loss.count(", at step 0 |") == 1  # what was exported was never evaluated
    assert "| `exp_avg_sq` | every 6 | 0 | 0 B |" in said
    assert first.name != last.name


def test_of_a_run_without_a_window_there_is_nothing_to_export(copy, tmp_path):
    shutil.rmtree(copy / "final")
    (copy / "summary.json").unlink()
    about = {"run_key": "k", "round": 0, "step": 0, "evaluated": 0, "versions": {}, "outer": {}}
    first, *_ = sorted(copy.glob("checkpoints/*"))
    averages = Checkpoint.read(first).averages
    begun = Checkpoints(tmp_path, 1, (copy / "config.yaml").read_text())
    begun.write(Checkpoint(**about, averages=averages))
    [file] = begun.all()
    shutil.copy(file, copy / "checkpoints" / file.name)
    with pytest.raises(ValueError, match="not completed a window"):
        export(copy / "checkpoints" / file.name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing_but_an_export(run, model, tmp_path):
    before = hashed(model)
    with pytest.raises(ValueError, match="is not empty; give another folder, or --overwrite"):
        export(run, model)
    (model / "config.json").write_text("{}")
    assert export(run, model, overwrite=True) == model
    assert hashed(model) == before
    (model / "LICENSE").write_text("mine")
    with pytest.raises(ValueError, match="holds LICENSE, which this export does not write"):
        export(run, model, overwrite=True)
    (model / "LICENSE").unlink()
    assert {oct(path.stat().st_mode & 0o777) for path in model.iterdir()} == {
        oct(model.stat().st_mode & 0o666)
    }
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("# My thesis")
    clone = export(run, tmp_path / "clone")
    (clone / ".git").mkdir()
    for folder in (mine, clone):
        with pytest.raises(ValueError, match="is not an exported model"):
            export(run, folder, overwrite=True)
    assert [path.name for path in mine.iterdir()] == ["README.md"]


def test_an_export_that_fails_leaves_nothing_behind(copy, tmp_path):
    assert "no such file or folder" in refused("export", tmp_path / "nowhere", tmp_path / "model")
    (copy / "config.yaml").write_text("run: 3")
    refused("export", copy, tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


def test_the_card_tells_the_runs_facts_and_names_no_site(run, model):
    page = ModelCard.load(model / "README.md")
    assert page.data.library_name == "transformers"
    assert page.data.pipeline_tag == "text-generation"
    facts = summary(run)
    for stream, period in facts["config"]["periods"].items():
        assert f"| `{stream}` | every {period} | {facts['syncs'][stream]} |" in page.text
    assert facts["weights_sha256"] in page.text
    loss = facts["evaluation"]["central"]["loss"]
    row = f"| on the server | loss | {loss['first']:.3f} | {loss['final']:.3f} |"
    assert row in page.text
    for client, held in facts["client_data"].items():
        assert client not in page.text
        assert not [domain for domain in held if f"{domain} " in page.text]
    assert str(run.parent) not in page.text


def test_the_card_of_a_model_and_data_from_the_hub_links_to_them(run):
    config = parse((run / "config.yaml").read_text())
    config = with_values(
        config,
        {
            "run.init_from": "org/base",
            "model.config": {"vocab_size": 256},
            "data.source": "org/text:a",
        },
    )
    data = ModelCard(card(config, summary(run))).data
    assert (data.base_model, data.datasets) == ("org/base", ["org/text"])


def test_the_card_of_a_custom_task_does_not_tell_settings_that_the_task_may_not_read(run):
    config = parse((run / "config.yaml").read_text())
    config = with_values(config, {"task": "cnn:CNN", "data.source": "org/text"})
    page = ModelCard(card(config, summary(run)))
    assert page.data.datasets is None
    assert "| model and data | those of a custom task |" in page.text
    for setting in ("org/text", "partition", "a step", "precision"):
        assert setting not in page.text


def test_the_card_tells_averages_besides_the_periods(run):
    config = parse((run / "config.yaml").read_text())
    config = with_values(config, {"sync_once_at": [3]})
    assert "| `params` | every 2 and after 3 |" in card(config, summary(run))


# -------------------------------------------------------------------------------------- generation


def test_a_model_goes_on_with_a_prompt(run, model):
    said = accepted("generate", model, "def ", "--tokens", 20, "--temperature", 0)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    start = torch.tensor([list(b"def ")])
    expected = loaded.generate(start, max_new_tokens=20, do_sample=False)[0]
    assert said == bytes(expected.tolist()).decode(errors="replace") + "\n"
    first, same, other = (
        accepted("generate", run, "def ", "--tokens", 20, "--seed", seed) for seed in (1, 1, 2)
    )
    assert first == same != other


def test_a_model_that_is_not_whole_is_neither_asked_nor_scored(model, questions, tmp_path):
    """Transformers draws at random what it does not find, and lm-eval scores NaN."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    whole = load_file(model / "model.safetensors")

    def save(tensors):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def assert_refused(said):
        assert said in refused("generate", folder, "x")
        assert said in refused("evaluate", folder, "--data", questions)

    save({name: tensor for name, tensor in whole.items() if "layers.0" not in name})
    assert_refused("its weights lack model.layers.0.")
    save(whole | {"model.norm.weight": torch.full((32,), math.nan)})
    assert_refused("contain NaN or infinity ('model.norm.weight' of stream 'params' has values")
    save(whole)
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert_refused("LlamaForSequenceClassification is not a causal language model")
    shutil.copy(model / "config.json", folder)
    (folder / "adapter_config.json").write_text("{}")
    assert_refused("holds adapters of peft")
    (folder / "adapter_config.json").unlink()
    for file in folder.glob("*token*"):
        file.unlink()
    assert_refused("has no tokenizer")


def test_generation_ends_with_the_models_window(model, tmp_path):
    result = desloc("generate", model, "x" * 60, "--tokens", 20)
    assert result.exit_code == 0, result.output
    assert "4 tokens: end of the text or of the model's length" in result.stderr
    assert "the prompt is empty" in refused("generate", model, "")
    assert "the model takes 64 at most" in refused("generate", model, "x" * 64)
    assert "has no checkpoint" in refused("generate", tmp_path, "x")


# ------------------------------------------------------------------------------------------ scores


THREE = {"text": ["tea", "é", "a stone"], "label": ["A", "B", "C"]}
TEA = {
    "activity_label": "Tea", "ctx_a": "She boils", "ctx_b": "water [x]",
    "endings": ["and drinks.", "stone.", "."],
}  # fmt: skip
QUESTIONS = {
    "piqa": [
        {"goal": f"do {i}", "sol1": "a b", "sol2": "the the th" * (i % 3 + 1), "label": i % 2}
        for i in range(6)
    ],
    "arc_easy": [
        {"question": f"which {i}?", "choices": THREE, "answerKey": "ABC"[i]} for i in range(3)
    ],
    "hellaswag": [TEA | {"label": str(i)} for i in range(3)],
    "mine": [{"query": "", "choices": ["yes", "no"], "gold": i % 2} for i in range(3)],
    "long": [{"query": "q" * 80, "choices": ["a", "b"], "gold": 1} for _ in range(2)],
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    for name, rows in QUESTIONS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_scores_on_local_files_are_those_worked_out_by_hand(model, questions, tmp_path):
    pytest.importorskip("lm_eval")
    names, file = ",".join(QUESTIONS), tmp_path / "scores.json"
    printed = accepted("evaluate", model, "--data", questions, "--tasks", names, "--json", file)
    scores = json.loads(file.read_text())["tasks"]
    loaded = AutoModelForCausalLM.from_pretrained(model)

    def likelihood(context, answer):
        prefix, rest = context.encode() or b"\n", f" {answer}".encode()
        tokens = torch.tensor([list(prefix + rest)])
        with torch.no_grad():
            known = log_softmax(loaded(tokens[:, :-1]).logits[0], -1)
        return float(known.gather(1, tokens[0, 1:, None])[len(prefix) - 1 :].sum())

    right = {"acc": 0, "acc_norm": 0}
    for row in QUESTIONS["piqa"]:
        answers = [row["sol1"], row["sol2"]]
        nats = [likelihood(f"Question: {row['goal']}\nAnswer:", answer) for answer in answers]
        per_letter = [nat / len(answer) for nat, answer in zip(nats, answers, strict=True)]
        for metric, values in (("acc", nats), ("acc_norm", per_letter)):
            right[metric] += values.index(max(values)) == row["label"]
    share, piqa = right["acc"] / 6, scores["piqa"]
    assert (piqa["acc"], piqa["acc_norm"]) == pytest.approx((share, right["acc_norm"] / 6))
    assert piqa["acc_stderr"] == pytest.approx((share * (1 - share) / 5) ** 0.5)
    # Of equal questions with every answer in turn, one is right each time.
    assert scores["hellaswag"]["acc"] == pytest.approx(1 / 3)
    assert {name: each["chance"] for name, each in scores.items()} == pytest.approx(
        {"piqa": 1 / 2, "arc_easy": 1 / 3, "hellaswag": 1 / 3, "mine": 1 / 2, "long": 1 / 2}
    )
    assert {name: each["questions"] for name, each in scores.items()} == {
        name: len(rows) for name, rows in QUESTIONS.items()
    }
    # The model sees 64 bytes.
    assert {name: each["cut"] for name, each in scores.items() if each["cut"]} == {"long": 4}
    assert "lost its beginning: 4 answers of long" in printed
    assert f"{100 * piqa['acc']:.1f} ±" in printed


def test_what_cannot_be_scored_is_said(model, questions, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")

    def said(*arguments):
        return refused("evaluate", model, *arguments)

    assert "No such file" in said("--data", tmp_path)
    shutil.copy(questions / "arc_easy.jsonl", tmp_path / "piqa.jsonl")
    columns = "needs choices, gold, query or goal, label, sol1, sol2"
    assert columns in said("--data", tmp_path, "--tasks", "piqa")
    whole = {"query": "one", "choices": ["a", "b"], "gold": 1}
    for question, why in [
        ("goal", "is not a JSON object"),
        ({**whole, "gold": "1"}, "the right answer is number '1', of 2 from 0"),
        ({**whole, "gold": -1}, "number -1"),
        ({**whole, "gold": True}, "number True"),
        ({**whole, "choices": ["a", ""]}, "an answer is empty, or not text"),
        ({**whole, "choices": ["a"]}, "two answers or more"),
        ({"query": "one", "choices": ["a", "b"]}, "KeyError: 'gold'"),
        ({**whole, "query": None}, "query is not text"),
    ]:
        (tmp_path / "mine.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(question)}\n")
        told = said("--data", tmp_path, "--tasks", "mine")
        assert f"{tmp_path}/mine.jsonl, line 2: " in told
        assert why in told
    (tmp_path / "mine.jsonl").write_text('{"query": "torn')
    assert "mine.jsonl, line 1: is not JSON (" in said("--data", tmp_path, "--tasks", "mine")
    (tmp_path / "mine.jsonl").write_text("")
    assert "holds no question" in said("--data", tmp_path, "--tasks", "mine")
    assert "'../mine' is not the name of a file" in said("--data", tmp_path, "--tasks", "../mine")
    assert "there is no writable folder" in said("--json", tmp_path / "no" / "scores.json")
    short = said("--data", questions, "--tasks", "piqa", "--window", 8)
    assert "an answer is longer than the 8 tokens that the model is shown" in short
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "install it with pip install 'flower-desloc[eval]'" in said()


# ------------------------------------------------------------------------------------------- start


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
    begun = initial(config)
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


def test_a_run_that_begins_with_an_exported_model_begins_with_its_loss(run, model, tmp_path):
    begun = train(tmp_path, f"run.init_from={model}", "run.steps=2", "model.hidden_size=64")
    before, after = (summary(f)["evaluation"]["central"]["loss"] for f in (run, begun))
    assert after["first"] == before["final"]
    assert AutoModelForCausalLM.from_pretrained(begun / "final").config.hidden_size == 32
    assert parse((begun / "config.yaml").read_text()).model.config["hidden_size"] == 32
    said = (export(begun) / "README.md").read_text()
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


def test_a_folder_a_name_and_a_run_are_told_apart(run, model):
    assert is_pretrained(str(model))
    assert is_pretrained("HuggingFaceTB/SmolLM2-135M")
    assert is_pretrained("gpt2")
    checkpoint = next(run.glob("checkpoints/*"))
    for name in (run, checkpoint, "./gpt2", "/no/such", "runs/a/checkpoints/step-1.safetensors"):
        assert not is_pretrained(str(name))
