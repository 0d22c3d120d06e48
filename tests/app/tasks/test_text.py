"""Laws of the text: what is read, what is held out, and who gets which documents."""

import argparse
import ast
import configparser
import gzip
import hashlib
import inspect
import io
import json
import math
import os
import random
import sys
import tokenize
from collections import Counter
from dataclasses import replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from processes import output_of
from scripts import ROOT

from flower_desloc.app.tasks.causal_lm import corpus as corpora
from flower_desloc.app.tasks.causal_lm.builtin import BUILTIN
from flower_desloc.app.tasks.causal_lm.corpus import client_rows, read, split
from flower_desloc.app.tasks.causal_lm.document_streams import open_domain
from flower_desloc.app.tasks.causal_lm.sources import cut, domains_of
from flower_desloc.app.tasks.partition import ClientRows, PartitionRule
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.app.tasks.source import Source

WORDS = ["loss", "clock", "mean", "stream", "drift", "half", "life", "moment", "adam", "window"]
RULES = ("iid", "by_domain", "dirichlet")


def prose(seed: str, count: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed} {i} " + " ".join(rng.choices(WORDS, k=30)) for i in range(count)]


def write(path: Path, documents: list[str], **columns: list[str]) -> Path:
    """Write documents in the format that the path's suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"text": document} | {name: column[i] for name, column in columns.items()}
        for i, document in enumerate(documents)
    ]
    match path.name.removesuffix(".gz").rsplit(".")[-1]:
        case "jsonl":
            content = "\n".join(map(json.dumps, rows)).encode()
        case "json":
            content = json.dumps(rows).encode()
        case "txt":
            content = "\n\n".join(documents).encode()
        case "parquet":
            buffer = io.BytesIO()
            Dataset.from_list(rows).to_parquet(buffer)
            content = buffer.getvalue()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def texts(documents: Dataset, domain: str | None = None) -> list[str]:
    pairs = zip(documents["text"][:], documents["domain"][:], strict=True)
    return [document for document, name in pairs if domain in (None, name)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Three domains of unlike size, a to c."""
    folder = tmp_path_factory.mktemp("three")
    for name, count in {"a": 300, "b": 200, "c": 100}.items():
        write(folder / f"{name}.jsonl.gz", prose(name, count))
    return Source(str(folder))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a data set with two configs, as the library knows them."""
    folder = tmp_path / "repository"
    for name in ("en", "fr"):
        write(folder / name / "train.jsonl", prose(name))
        write(folder / name / "validation.jsonl", [f"{name} held out"])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_dir: en\n- config_name: fr\n  data_dir: fr\n---\n"
    )
    return folder


# --------------------------------------------------------------------------------------- documents


@given(st.lists(st.text("ab \n", max_size=60), max_size=8), st.integers(1, 30))
def test_cutting_keeps_every_letter_in_order_and_the_size(paragraphs, size):
    documents = list(cut(paragraphs, size))
    assert all(len(document) <= size for document in documents)
    assert "".join("".join(documents).split()) == "".join("".join(paragraphs).split())


@given(st.lists(st.text(min_size=2), min_size=1, max_size=30), st.floats(0.001, 0.5))
def test_held_out_documents_are_never_trained_on(documents, fraction):
    train, heldout = split(documents, fraction)
    assert train
    assert heldout
    if len(set(documents)) > 1:
        assert not set(train) & set(heldout)
        assert Counter(train + heldout) == Counter(documents)
    else:
        assert "".join(train + heldout) == documents[0]


@given(st.permutations(prose("a", 12)))
def test_who_is_held_out_does_not_depend_on_the_order(documents):
    assert set(split(documents, 0.25)[1]) == set(split(prose("a", 12), 0.25)[1])


# ----------------------------------------------------------------------------------------- builtin


def test_the_builtin_text_has_four_domains_in_a_fixed_order():
    corpus = read(Source("builtin", max_bytes=300_000))
    assert corpus.domains == ("docs", "code", "docstrings", "reference")
    for domain in corpus.domains:
        assert sum(map(len, texts(corpus.train, domain))) > 200_000


@pytest.mark.parametrize("inside", ["site-packages/ray/thirdparty_files", "more"])
def test_the_builtin_descriptions_stay_the_same_whatever_else_is_installed(
    inside, tmp_path, monkeypatch
):
    before = list(BUILTIN["docs"]())
    (tmp_path / inside / "brought-1.0.dist-info").mkdir(parents=True)
    (tmp_path / inside / "brought-1.0.dist-info" / "METADATA").write_text(
        "Name: brought\nVersion: 1\n\nAlong.\n"
    )
    monkeypatch.syspath_prepend(tmp_path / inside)  # as Ray does with the first
    assert metadata.version("brought")
    assert list(BUILTIN["docs"]()) == before
    assert len(before) > 20
    own: Any = metadata.metadata("flower-desloc")
    assert not any(own.get_payload().strip()[:200] in text for text in before)


def words_of(code: str) -> list[str]:
    """Return the tokens of code without layout, comments and strings that are statements."""
    words, begins = [], True
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.NEWLINE or (begins and token.type == tokenize.STRING):
            begins = True
            continue
        begins = False
        words.append(token.string)
    return words


def test_the_builtin_code_is_the_librarys_without_comments_and_docstrings():
    codes = list(islice(BUILTIN["code"](), 120))
    docstrings = list(islice(BUILTIN["docstrings"](), 120))
    for module, content in (
        (ast, "class NodeVisitor("),
        (argparse, "class ArgumentParser("),
        (configparser, "class RawConfigParser("),  # has "#" in a string
    ):
        [code] = [code for code in codes if content in code]
        assert words_of(code) == words_of(inspect.getsource(module))
        comments = tokenize.generate_tokens(io.StringIO(code).readline)
        assert not any(token.type == tokenize.COMMENT for token in comments)
        assert module.__doc__ is not None
        assert inspect.cleandoc(module.__doc__) not in code
        assert any(inspect.cleandoc(module.__doc__) in text for text in docstrings)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "json.gz", "parquet"])
def test_every_format_holds_the_same_documents_and_its_path_is_no_pattern(tmp_path, suffix):
    corpus = read(Source(str(write(tmp_path / "run [1]*" / f"a.{suffix}", prose("a")))))
    assert corpus.domains == ("a",)
    assert sorted(texts(corpus.train) + texts(corpus.heldout)) == sorted(prose("a"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_files_of_ones_own_are_opened_without_a_request_to_anyone(tmp_path, monkeypatch, suffix):
    """`datasets` counts uses at its makers, even of local files, unless it is told not to."""
    asked = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: asked.append("session"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    file = write(tmp_path / f"a.{suffix}", prose("a"))
    assert texts(read(Source(str(file))).train)
    assert not asked
    datasets.load_dataset_builder("text", data_files=str(file))
    assert asked  # or this test proves nothing
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS  # as the user has it


def test_the_last_of_several_threads_restores_the_users_settings():
    """Their blocks overlap; before, the second kept for the user what the first had set."""
    first, second = quiet(), quiet()
    for enter in (first, second):
        enter.__enter__()
    first.__exit__(None, None, None)
    assert not datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    assert datasets.are_progress_bars_disabled()
    second.__exit__(None, None, None)
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_plain_text_is_cut_at_paragraph_ends(tmp_path, suffix):
    corpus = read(Source(str(write(tmp_path / f"a.{suffix}", prose("a", 100)))))
    documents = texts(corpus.train) + texts(corpus.heldout)
    assert sorted("\n\n".join(documents).split("\n\n")) == sorted(prose("a", 100))
    assert all(len(document) <= 4000 for document in documents)
    assert len(documents) < 10


# File -> the domain its text is trained on, or "DOMAIN held out", or None if it is not read.
LAYOUTS = {
    "a file or subfolder for each domain": {
        "b-1.5.jsonl.gz": "b-1.5",
        "a/train-0.jsonl": "a",
        "a/train-1.parquet": "a",
        "a/validation.jsonl": "a held out",
        ".hidden.jsonl": None,
        ".git/a.jsonl": None,
    },
    "training and validation files side by side": {
        "train-00000-of-00001.jsonl": "site",
        "valid_00000-of-00001.jsonl": "site held out",
        "extra/more.jsonl": "extra",
    },
    "training and validation folders side by side": {
        "train/a.jsonl": "site",
        "train/test-drive.jsonl": "site",
        "test/b.jsonl": "site held out",
        "more/c.jsonl": "more",
    },
    "such folders within one of several domains": {
        "inner/train/a.jsonl": "inner",
        "inner/test/b.jsonl": "inner held out",
        "other.jsonl": "other",
    },
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS)
def test_files_and_folders_make_domains_and_held_out_parts(tmp_path, files):
    for name in files:
        write(tmp_path / "site" / name, prose(name, 20))
    (tmp_path / "site" / "README.md").write_text("not read")
    corpus = read(Source(str(tmp_path / "site")))
    domains = {place.removesuffix(" held out") for place in files.values() if place}
    assert corpus.domains == tuple(sorted(domains))
    for domain in domains:
        own, heldout = (
            sorted(t for name, place in files.items() if place == of for t in prose(name, 20))
            for of in (domain, f"{domain} held out")
        )
        found = [sorted(texts(part, domain)) for part in (corpus.train, corpus.heldout)]
        if heldout:
            assert found == [own, heldout]
        else:
            assert sorted(found[0] + found[1]) == own
            assert len(found[1]) == round(0.1 * len(own))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_word_that_begins_like_test_is_no_test(tmp_path, streaming):
    names = ("articles", "testimony", "validity", "trains", "test_questions", "validation-notes")
    for name in names:
        write(tmp_path / f"{name}.jsonl", prose(name))
    # Alone in its domain, it says nothing either.
    write(tmp_path / "test.jsonl", prose("test"))
    source = Source("builtin", streaming=streaming).at_site(tmp_path)
    found = domains_of(source)
    assert sorted(found) == ([tmp_path.name] if streaming else sorted([*names, "test"]))
    rows = [row["text"] for unit in found.values() for row in unit.train()]
    assert sorted(rows) == sorted(text for name in (*names, "test") for text in prose(name))
    assert all(unit.heldout is None for unit in found.values())


def test_a_column_makes_the_domains(tmp_path):
    path = write(tmp_path / "all.jsonl", prose("u") + prose("v"), site=["u"] * 40 + ["v"] * 40)
    corpus = read(Source(str(path), domain_field="site"))
    assert corpus.domains == ("u", "v")
    assert all(document.startswith("v ") for document in texts(corpus.heldout, "v"))
    only = read(Source(str(path), ("v",), domain_field="site"))
    assert only.domains == ("v",)
    assert len(only.train) + len(only.heldout) == 40


def test_a_column_that_is_the_partition_gives_each_value_a_client(tmp_path):
    sites = ["u"] * 40 + ["v"] * 10
    path = write(tmp_path / "all.jsonl", prose("u") + prose("v", 10), site=sites)
    source = Source(str(path), column="site")
    corpus = read(source)
    dealt = deal(source, "column:site", 2)
    assert [{corpus.train["domain"][row] for row in share.train} for share in dealt] == [
        {"u"},
        {"v"},
    ]
    assert sorted(row for share in dealt for row in share.train) == [*range(len(corpus.train))]
    assert all(corpus.heldout["domain"][row] == "v" for row in dealt[1].heldout)


@pytest.mark.parametrize("max_bytes", [2, 101, 1000, 1800, 5000])
def test_max_bytes_is_the_most_read_of_a_domain(max_bytes, monkeypatch):
    texts = (f"{n} {'é' * 99}" for n in range(9))  # 200 bytes each
    monkeypatch.setitem(BUILTIN, "code", lambda: texts)
    corpus = corpora.read.__wrapped__(Source("builtin", ("code",), max_bytes=max_bytes))
    size = sum(len(t.encode()) for part in (corpus.train, corpus.heldout) for t in part["text"])
    assert min(max_bytes, 1800) - 1 <= size <= max_bytes
    assert sum(1 for _ in texts) == max(0, 9 - math.ceil(max_bytes / 200))  # What was not read.


def test_requested_domains_come_in_their_order(three):
    assert read(replace(three, domains=("c", "a"))).domains == ("c", "a")


# ------------------------------------------------------------------------------------------- named


@pytest.mark.parametrize("streaming", [True, False])
def test_a_config_of_a_named_data_set_is_a_domain_read_without_a_word(
    repository, tmp_path, monkeypatch, capfd, streaming
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert list(domains_of(Source(str(repository)))) == ["en", "fr"]
    corpus = read(Source(f"{repository}:fr", streaming=streaming, max_bytes=2000))
    assert corpus.domains == ("fr",)
    assert texts(corpus.heldout) == ["fr held out"]
    assert texts(corpus.train)[:5] == prose("fr")[:5]
    assert sum(map(len, texts(corpus.train))) == 2000
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


# ---------------------------------------------------------------------------------------- messages


NEITHER = "neither `builtin`, nor a file or folder here, nor"
UNUSABLE = [
    ("no-such-set", {}, f"^data.source=no-such-set: {NEITHER}"),
    ("../no/such/path", {}, f"^data.source=../no/such/path: {NEITHER}"),
    ("no/such.jsonl", {}, f"^data.source=no/such.jsonl: {NEITHER}"),
    ("FOLDER/empty", {}, "^data.source=.*: it holds no file of a supported format"),
    ("FOLDER/blank.jsonl", {}, "^data.source=.*: its domain 'blank' holds too little text"),
    ("FOLDER/number.jsonl", {}, "^data.text_field=text: .* holds int, not text$"),
    ("THREE", {"text_field": "body"}, "^data.text_field=body: .* it has text$"),
    ("THREE", {"domain_field": "site"}, "^data.domain_field=site: .* it has text$"),
    ("THREE", {"column": "site"}, "^data.partition=column:site: .* it has text$"),
    ("THREE", {"domains": ("a", "x")}, r"^data.domains=\['a', 'x'\]: .* 'x'; it has a, b, c$"),
    ("builtin", {"domains": ("x",)}, "^data.domains=.* it has docs, code, docstrings"),
    ("REPOSITORY:de", {}, "^data.source=.*:de: .* no such config, only en, fr"),
    (
        "REPOSITORY:en",
        {"domain_field": "text", "streaming": True},
        r"^data.domains=\[\]: state the values",
    ),
]


@pytest.mark.parametrize(("where", "settings", "message"), UNUSABLE)
def test_text_that_cannot_be_used_is_an_error_that_names_the_setting(
    three, repository, tmp_path, monkeypatch, where, settings, message
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "number.jsonl").write_text('{"text": 1}')
    write(tmp_path / "blank.jsonl", ["  ", "\n"])
    places = {"FOLDER": tmp_path, "THREE": three.source, "REPOSITORY": repository}
    for word, place in places.items():
        where = where.replace(word, str(place))
    with pytest.raises(ValueError, match=message):
        read(Source(where, **settings))


LINES = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(500))
UNREADABLE = {
    "torn": ("site/b.jsonl", LINES[:-9], "JSON"),
    "latin-1": (
        "site/b.jsonl",
        LINES.replace(b'document 9"', b'document \xe9"'),
        "UnicodeDecodeError",
    ),
    "no gzip": ("site/b.jsonl.gz", LINES, "BadGzipFile"),
    "cut gzip": ("site/b.jsonl.gz", gzip.compress(LINES)[:-20], "EOFError"),
    "no parquet": ("site/b.parquet", LINES, "Parquet"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "data", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_of_many_files_the_one_that_cannot_be_read_is_named(tmp_path, name, data, said, streaming):
    for number in range(3):
        write(tmp_path / "text" / "site" / f"a-{number}.jsonl", prose(str(number)))
    (tmp_path / "text" / name).write_bytes(data)
    source = Source(str(tmp_path / "text"), streaming=streaming)
    with pytest.raises(ValueError, match=rf"^data\.source=.*/text: cannot read \S*{name} .*{said}"):
        [*open_domain(source, name.split("/")[0]).heldout()] if streaming else read(source)


# --------------------------------------------------------------------------------------- partition


def deal(source: Source, name: str, num_clients: int, seed: int = 0) -> list[ClientRows]:
    return client_rows(source, PartitionRule(name, 0.5, seed), num_clients)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_clients", [1, 2, 3, 5, 9, 100])
def test_every_training_document_goes_to_one_client_that_is_tested_on_its_domains(
    three, name, num_clients
):
    corpus, dealt = read(three), deal(three, name, num_clients)
    rows = [row for share in dealt for row in share.train]
    assert sorted(rows) == list(range(len(corpus.train)))
    for share in dealt:
        assert share.train == sorted(share.train)
        trained = {corpus.train["domain"][row] for row in share.train}
        assert trained & {corpus.heldout["domain"][row] for row in share.heldout}


def digest(source: Source) -> str:
    dealt = [deal(source, name, 9, seed=7) for name in RULES]
    corpus = read(source)
    content = repr((dealt, texts(corpus.train), texts(corpus.heldout)))
    return hashlib.sha256(content.encode()).hexdigest()


@pytest.mark.soak  # ten seconds of imports
def test_another_process_deals_the_same_documents(three):
    code = f"import test_text; print(test_text.digest(test_text.Source({three.source!r})))"
    path = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]
    environment = os.environ | {"PYTHONHASHSEED": "3", "PYTHONPATH": os.pathsep.join(path)}
    assert output_of([sys.executable, "-c", code], env=environment).strip() == digest(three)


@pytest.mark.parametrize("name", RULES)
def test_another_seed_deals_other_documents(three, name):
    assert deal(three, name, 4, seed=1) != deal(three, name, 4, seed=2)


def test_by_domain_the_first_client_has_the_mixture_and_each_other_one_domain(three):
    domains = read(three).train["domain"][:]
    dealt = deal(three, "by_domain", 6)
    clients = [Counter(domains[row] for row in share.train) for share in dealt]
    assert [set(client) for client in clients] == [
        {"a", "b", "c"}, {"b"}, {"c"},
        {"a", "b", "c"}, {"b"}, {"c"},
    ]  # fmt: skip
    for domain in ("b", "c"):  # Those who hold a domain hold equal parts of it.
        held = [client[domain] for client in clients if client[domain]]
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize("name", ["by_domain", "dirichlet"])
def test_a_client_is_dealt_its_share_of_the_held_out_text_too(three, name):
    corpus = read(three)
    trained, kept = corpus.train["domain"][:], corpus.heldout["domain"][:]
    for share in deal(three, name, 4, seed=1):
        train = Counter(trained[row] for row in share.train)
        heldout = Counter(kept[row] for row in share.heldout)
        for domain in corpus.domains:  # But for rounding, twice.
            expected = train[domain] * kept.count(domain) / trained.count(domain)
            assert heldout[domain] == pytest.approx(expected, abs=1.2)
