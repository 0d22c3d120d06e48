"""Exporting, evaluating and generating from a run's model; starting a run from a model."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny import summary
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from flower_desloc.cli import app
from flower_desloc.config import Config, ConfigError, dump, load, parse
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import digest
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.setup.initial import initial, is_pretrained, with_init_from
from flower_desloc.tasks import build_task
from flower_desloc.tasks.causal_lm.tokens import ByteTokenizer
from flower_desloc.tools.models.card import card
from flower_desloc.tools.models.export import export

SMALL = [
    "run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=6",
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1",
    "data.domains=[docs,code]", "data.max_bytes=20000", "data.seq_len=64", "data.batch_size=2",
    "federation.num_clients=2", "evaluation.sequences=4",
]  # fmt: skip


def train(output_dir: Path, *overrides: str) -> Path:
    return tiny.train(output_dir, *SMALL, *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may harm."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    return export(run, run.parent / "model")


def desloc(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def hashed(folder: Path) -> str:
    return digest(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


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
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("# My thesis")
    with pytest.raises(ValueError, match="is not an exported model"):
        export(run, mine, overwrite=True)
    (model / "LICENSE").write_text("mine")
    with pytest.raises(ValueError, match="holds LICENSE, which this export does not write"):
        export(run, model, overwrite=True)
    (model / "LICENSE").unlink()
    assert {oct(path.stat().st_mode & 0o777) for path in model.iterdir()} == {
        oct(model.stat().st_mode & 0o666)
    }
    export(run, tmp_path / "clone")
    (tmp_path / "clone" / ".git").mkdir()
    with pytest.raises(ValueError, match="is not an exported model"):
        export(run, tmp_path / "clone", overwrite=True)
    with pytest.raises(ValueError, match="no such file or folder"):
        export(tmp_path / "nowhere", tmp_path / "there")
    assert [path.name for path in mine.iterdir()] == ["README.md"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "clone"}


def test_an_export_that_fails_leaves_nothing_behind(copy, tmp_path):
    (copy / "config.yaml").write_text("run: 3")
    result = desloc("export", copy, tmp_path / "model")
    assert result.exit_code == 2, result.output
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
    config.run.init_from, config.model.config = "org/base", {"vocab_size": 256}
    config.data.source = "org/text:a"
    data = ModelCard(card(config, summary(run))).data
    assert (data.base_model, data.datasets) == ("org/base", ["org/text"])


# -------------------------------------------------------------------------------------- generation


def test_a_model_goes_on_with_a_prompt(run, model):
    said = desloc("generate", model, "def ", "--tokens", 20, "--temperature", 0)
    assert said.exit_code == 0, said.output
    loaded = AutoModelForCausalLM.from_pretrained(model)
    start = torch.tensor([list(b"def ")])
    expected = loaded.generate(start, max_new_tokens=20, do_sample=False)[0]
    assert said.stdout == bytes(expected.tolist()).decode(errors="replace") + "\n"
    first, same, other = (
        desloc("generate", run, "def ", "--tokens", 20, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first == same != other


def test_a_model_that_is_not_whole_is_neither_asked_nor_scored(model, questions, tmp_path):
    """Transformers draws at random what it does not find, and lm-eval scores NaN."""

    def changed(name, change):
        folder = shutil.copytree(model, tmp_path / name)
        change(folder)
        return folder

    def without_a_layer(folder):
        tensors = load_file(folder / "model.safetensors")
        kept = {name: t for name, t in tensors.items() if "layers.0" not in name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    def with_a_nan(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] = math.nan
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def a_classifier(folder):
        file = folder / "config.json"
        about = json.loads(file.read_text())
        file.write_text(json.dumps(about | {"architectures": ["LlamaForSequenceClassification"]}))

    def without_tokenizer(folder):
        for file in folder.glob("*token*"):
            file.unlink()

    def adapters(folder):
        (folder / "adapter_config.json").write_text("{}")

    for change, said in (
        (without_a_layer, "its weights lack model.layers.0."),
        (with_a_nan, "contain NaN or infinity ('model.norm.weight' of stream 'params' has values"),
        (a_classifier, "LlamaForSequenceClassification is not a causal language model"),
        (without_tokenizer, "has no tokenizer"),
        (adapters, "holds adapters of peft"),
    ):
        folder = changed(change.__name__, change)
        for command in (["generate", folder, "x"], ["evaluate", folder, "--data", questions]):
            result = desloc(*command)
            assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_generation_ends_with_the_models_window(model, tmp_path):
    result = desloc("generate", model, "x" * 60, "--tokens", 20)
    assert result.exit_code == 0, result.output
    assert "4 tokens: end of the text or of the model's length" in result.stderr
    for prompt, said in (("", "the prompt is empty"), ("x" * 64, "the model takes 64 at most")):
        result = desloc("generate", model, prompt)
        assert (result.exit_code, said in result.stderr) == (2, True)
    result = desloc("generate", tmp_path, "x")
    assert (result.exit_code, "has no checkpoint" in result.stderr) == (2, True)


# ------------------------------------------------------------------------------------------ scores


QUESTIONS = {
    "piqa": [
        {"goal": f"do {i}", "sol1": "a b", "sol2": "the the th" * (i % 3 + 1), "label": i % 2}
        for i in range(6)
    ],
    "arc_easy": [
        {
            "question": f"which {i}?",
            "choices": {"text": ["tea", "é", "a stone"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[i % 3],
        }
        for i in range(3)
    ],
    "hellaswag": [
        {
            "activity_label": "Tea",
            "ctx_a": "She boils",
            "ctx_b": "water [x]",
            "endings": ["and drinks.", "stone.", "."],
            "label": str(i),
        }
        for i in range(3)
    ],
    "mine": [{"query": "", "choices": ["yes", "no"], "gold": i % 2} for i in range(3)],
    "long": [{"query": "q" * 80, "choices": ["a", "b"], "gold": 1} for _ in range(2)],
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    for name, rows in QUESTIONS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_scores_on_local_files_are_those_worked_out_by_hand(model, questions, tmp_path):
    pytest.importorskip("lm_eval")
    names = ",".join(QUESTIONS)
    file = tmp_path / "scores.json"
    result = desloc("evaluate", model, "--data", questions, "--tasks", names, "--json", file)
    assert result.exit_code == 0, result.output
    scores = json.loads(file.read_text())["tasks"]
    loaded = AutoModelForCausalLM.from_pretrained(model)

    def likelihood(context: str, answer: str) -> float:
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
    assert scores["piqa"]["acc"] == pytest.approx(right["acc"] / 6)
    assert scores["piqa"]["acc_norm"] == pytest.approx(right["acc_norm"] / 6)
    share = right["acc"] / 6
    assert scores["piqa"]["acc_stderr"] == pytest.approx((share * (1 - share) / 5) ** 0.5)
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
    assert "lost its beginning: 4 answers of long" in result.stdout
    assert f"{100 * scores['piqa']['acc']:.1f} ±" in result.stdout


def test_what_cannot_be_scored_is_said(model, questions, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")

    def said(*arguments: object) -> str:
        result = desloc("evaluate", model, *arguments)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.split())

    assert "No such file" in said("--data", tmp_path)
    shutil.copy(questions / "arc_easy.jsonl", tmp_path / "piqa.jsonl")
    columns = "needs choices, gold, query or goal, label, sol1, sol2"
    assert columns in said("--data", tmp_path, "--tasks", "piqa")
    whole = {"query": "one", "choices": ["a", "b"], "gold": 1}
    wrong: list[tuple[object, str]] = [
        ("goal", "is not a JSON object"),
        ({**whole, "gold": "1"}, "the right answer is number '1', of 2 from 0"),
        ({**whole, "gold": -1}, "number -1"),
        ({**whole, "gold": True}, "number True"),
        ({**whole, "choices": ["a", ""]}, "an answer is empty, or not text"),
        ({**whole, "choices": ["a"]}, "two answers or more"),
        ({"query": "one", "choices": ["a", "b"]}, "KeyError: 'gold'"),
        ({**whole, "query": None}, "query is not text"),
    ]
    for question, why in wrong:
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


def a_model(folder: Path, kind: str, tokenizer: bool = True, **settings: Any) -> Any:
    """Write a model of transformers' own making; return it."""
    small = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": None}
    if kind == "llama":
        small |= {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
        small |= {"num_attention_heads": 6, "num_key_value_heads": 2}
        small |= {"max_position_embeddings": 64}
    else:
        small |= {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = transformers.AutoConfig.for_model(kind, **small | settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="20KB")
    if tokenizer:
        ByteTokenizer().save(folder)
    return model.eval()


def config_for(folder: Path | str, *overrides: str) -> Config:
    return load("quickstart", [*SMALL, f"run.init_from={folder}", *overrides])


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
    kept = json.loads(index.read_text())
    fewer = {name: file for name, file in kept["weight_map"].items() if file != shards[0].name}
    index.write_text(json.dumps(kept | {"weight_map": fewer}))
    with pytest.raises(ConfigError, match=r"its weights lack model\.\S+, .* in all"):
        initial(config)
    index.write_text(json.dumps(kept))
    (tmp_path / "nan").mkdir()
    own = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    own["model.norm.weight"][3] = float("nan")
    theirs.save_pretrained(tmp_path / "nan", state_dict=own)
    ByteTokenizer().save(tmp_path / "nan")
    with pytest.raises(ConfigError, match=r"run\.init_from=.*/nan: its weights contain NaN"):
        initial(with_init_from(config_for(tmp_path / "nan")))
    other = json.loads((tmp_path / "nan" / "config.json").read_text())
    (tmp_path / "nan" / "config.json").write_text(json.dumps(other | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match=r"of other shapes than its config\.json states"):
        initial(with_init_from(config_for(tmp_path / "nan")))
    shards[0].write_bytes(shards[0].read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot read its weights, safetensors"):
        initial(config)
    for file in (index, *shards):
        file.unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot read its weights, safetensors"):
        initial(config)


def test_a_model_and_data_that_do_not_go_together_are_refused(tmp_path):
    a_model(tmp_path / "bare", "llama", tokenizer=False)
    with pytest.raises(ConfigError, match=r"it has no tokenizer; set data\.tokenizer"):
        with_init_from(config_for(tmp_path / "bare"))
    a_model(tmp_path / "empty", "gpt2", tokenizer=False)
    with pytest.raises(ConfigError, match=r"it has no tokenizer; set data\.tokenizer"):
        with_init_from(config_for(tmp_path / "empty"))
    a_model(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match=r"data\.seq_len=65: the model takes at most 64 tokens"):
        with_init_from(config_for(tmp_path / "model", "data.seq_len=65"))
    shifted = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocab = shifted["model"]["vocab"]
    shifted["model"]["vocab"] = {piece: (i + 1) % 256 for piece, i in vocab.items()}
    (tmp_path / "other.json").write_text(json.dumps(shifted))
    with pytest.raises(ConfigError, match="has other numbers for the same text"):
        with_init_from(config_for(tmp_path / "model", f"data.tokenizer={tmp_path / 'other.json'}"))
    a_model(tmp_path / "few", "llama", vocab_size=200)
    with pytest.raises(ConfigError, match="it has 256 tokens, the model 200"):
        with_init_from(config_for(tmp_path / "few"))
    with pytest.raises(ConfigError, match="a model of transformers is for task=causal_lm"):
        with_init_from(load("digits", [f"run.init_from={tmp_path / 'model'}"]))
    config = json.loads((tmp_path / "few" / "config.json").read_text())
    masked = config | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "few" / "config.json").write_text(json.dumps(masked))
    with pytest.raises(ConfigError, match="BertForMaskedLM is not a causal language model"):
        with_init_from(config_for(tmp_path / "few"))
    (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="vit is not a causal language model"):
        with_init_from(config_for(tmp_path / "model"))


def test_a_tokenizer_of_its_own_goes_with_a_model(tmp_path):
    a_model(tmp_path, "llama", vocab_size=300)
    file = tmp_path / "tokenizer.json"
    own = json.loads(file.read_text())
    own["model"]["vocab"] = {piece: i + 3 for piece, i in own["model"]["vocab"].items()}
    file.write_text(json.dumps(own))
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
