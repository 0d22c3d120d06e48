"""``final/`` of a language model, used with the commands of transformers and lm-eval."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from flower_desloc.app.config import load
from flower_desloc.app.tasks import build_task
from flower_desloc.app.tasks.causal_lm.tokens import ByteTokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
SMALL = [*tiny.TINY, "data.seq_len=64", "simulation.num_clients=2", "run.steps=2"]


@pytest.fixture(scope="module")
def final(tmp_path_factory):
    """The folder ``final`` of a run on bytes."""
    return tiny.train(tmp_path_factory.mktemp("run"), *SMALL, "run.eval_every=0") / "final"


@pytest.fixture(scope="module")
def subwords(tmp_path_factory):
    """The file of a tokenizer without a token for padding."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    text = ["one naïve fox jumps, def f(x): return x\n" * 9]
    special = {"special_tokens": ["</s>"], "show_progress": False}
    tokenizer.train_from_iterator(text, vocab_size=300, **special)
    file = tmp_path_factory.mktemp("tokenizer") / "own.json"
    tokenizer.save(str(file))
    return file


# --------------------------------------------------------------------------------------- tokenizer


def test_the_saved_tokenizer_of_bytes_has_the_ids_of_training(final):
    ours, theirs = ByteTokenizer(), AutoTokenizer.from_pretrained(final)

    @given(st.text() | st.sampled_from(["<|endoftext|>", "\n\n", "Ċ", "ÿ", "\0", "你好 😀\r\n "]))
    def law(text):
        ids = list(text.encode())
        assert theirs.encode(text) == ids
        assert theirs([text, "some other text"], padding=True)["input_ids"][0][: len(ids)] == ids
        assert theirs.decode(ids) == text
        assert ours.encode([text, text]).ids.tolist() == theirs.encode(f"{text}\n\n{text}")

    @given(st.binary())
    def also_of_what_is_not_text(some):
        ids = [byte for byte in some if byte != 0xFF]
        assert theirs.decode(ids) == bytes(ids).decode(errors="replace")

    law()
    also_of_what_is_not_text()
    assert {theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id} == {0xFF}
    assert theirs.decode([65, 0xFF, 66], skip_special_tokens=True) == "AB"
    assert len(theirs) == 256


def test_a_saved_tokenizer_of_bytes_is_that_of_bytes(final):
    """As a folder and as a file, so that a run with it separates documents in the same way."""
    assert isinstance(load_tokenizer(str(final)), ByteTokenizer)
    assert isinstance(load_tokenizer(str(final / "tokenizer.json")), ByteTokenizer)


# -------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt_neox", False)]
)
def test_the_pipeline_continues_a_text(kind, tied, tokenizer, subwords, tmp_path):
    name = "bytes" if tokenizer == "bytes" else subwords
    model = [f"model.type={kind}", f"model.tie_word_embeddings={tied}", f"data.tokenizer={name}"]
    task = build_task(load("quickstart", [*SMALL, *model]))
    trained: Any = task.build_model()
    task.save(trained, tmp_path)
    generate: Any = pipeline("text-generation", str(tmp_path))
    prompt, few = "def naïve", {"max_new_tokens": 8, "do_sample": False}
    [said] = generate(prompt, return_tensors=True, **few)
    start = load_tokenizer(str(name)).encode([prompt]).ids.tolist()
    start = [token for token in start if token != trained.config.eos_token_id]
    expected = trained.generate(torch.tensor([start]), **few)[0].tolist()
    assert said["generated_token_ids"] == expected
    # Without a number of tokens it ends with the model's window; the paper's have 64 positions.
    [said] = generate(prompt, return_tensors=True, do_sample=False)
    assert len(said["generated_token_ids"]) <= 64
    [answer] = generate([[{"role": "user", "content": prompt}]], return_full_text=False, **few)
    assert answer[0]["generated_text"] == generate.tokenizer.decode(
        expected[len(start) :], skip_special_tokens=True
    )


# ------------------------------------------------------------------------------------------ scores


QUESTIONS: list[dict[str, Any]] = [
    {"query": "The capital of France is", "choices": ["Lyon", "Paris"], "gold": 1},
    {"query": "", "choices": ["yes", "no", "né"], "gold": 0},
    {"query": "q" * 80, "choices": ["a", "b"], "gold": 1},  # longer than the model's 64 bytes
]


@pytest.mark.soak
def test_lm_eval_scores_local_questions(final, tmp_path):
    """With the task file of docs/how-to/large-models.md; the likelihoods by hand."""
    pytest.importorskip("lm_eval")
    page = (ROOT / "docs" / "how-to" / "large-models.md").read_text()
    (task,) = re.findall(r"```yaml\n(task: .*?)```", page, re.DOTALL)
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "own.yaml").write_text(task)
    rows = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    (tmp_path / "questions" / "own.jsonl").write_text(rows)
    (command,) = re.findall(r"^(lm_eval .*?)$", page.replace("\\\n", ""), re.MULTILINE)
    words = command.replace("runs/quickstart/final", str(final)).split()[1:]
    more = ["--output_path", "scores", "--log_samples", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, *more],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "scores").rglob("samples_own_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(final)
    for row, sample in zip(QUESTIONS, sorted(samples, key=lambda s: s["doc_id"]), strict=True):
        found = [float(answer[0][0]) for answer in sample["resps"]]
        for answer, nats in zip(row["choices"], found, strict=True):
            context, rest = row["query"].encode() or b"\xff", f" {answer}".encode()
            tokens = torch.tensor([list(context + rest)[-65:]])
            with torch.no_grad():
                known = log_softmax(model(tokens[:, :-1]).logits[0], -1)
            by_hand = known.gather(1, tokens[0, 1:, None])[-len(rest) :].sum()
            assert nats == pytest.approx(float(by_hand), abs=1e-3)
        assert sample["acc"] == (found.index(max(found)) == row["gold"])
