"""Streaming text: partitions, packing, the cache on disk, evaluation and retries."""

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import aiohttp
import datasets
import pytest
import torch
from configurations import with_values
from test_text import prose, write
from tiny import TINY, failing_at, summary, train

from flower_desloc.app.config import Config, ConfigError, load
from flower_desloc.app.config.check import check
from flower_desloc.app.tasks import Site, retry
from flower_desloc.app.tasks.causal_lm import CausalLM, document_streams, sources, streaming
from flower_desloc.app.tasks.causal_lm.corpus import read
from flower_desloc.app.tasks.causal_lm.document_streams import (
    DocumentStream,
    DomainShare,
    client_shares,
    domain_names,
    open_domain,
)
from flower_desloc.app.tasks.causal_lm.sources import Domain, OpenFiles, shards_of
from flower_desloc.app.tasks.causal_lm.streaming import BLOCK
from flower_desloc.app.tasks.retry import retry_network
from flower_desloc.app.tasks.source import Source

WEIGHTS = [5.0, 3.0, 2.0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder for this test, with nothing open, as in a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # or nothing is tried again
    forget()
    return tmp_path / "cache"


def forget() -> None:
    """Close all domains, as at the end of a process."""
    open_domain.cache_clear()
    domain_names.cache_clear()


def lose(cache: Path) -> None:
    """Start a new process that finds no packed text."""
    for file in cache.rglob("*.safetensors"):
        file.unlink()
    forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three domains: one file, five files of two formats, a file with held-out text."""
    path = tmp_path_factory.mktemp("stream")
    write(path / "a.jsonl.gz", prose("a", 120))
    for number, suffix in enumerate(["jsonl", "parquet", "jsonl", "parquet", "jsonl"]):
        write(path / "b" / f"part-{number}.{suffix}", prose(f"b{number}", 30))
    write(path / "c" / "train.parquet", prose("c", 80))
    write(path / "c" / "validation.parquet", prose("kept", 40))
    return path


@pytest.fixture
def source(folder: Path) -> Source:
    return Source(str(folder), ("a", "b", "c"), streaming=True)


@pytest.fixture
def config(folder: Path) -> Config:
    words = [
        *TINY, f"data.source={folder}", "data.domains=[a,b,c]", "data.weights=[5,3,2]",
        "data.streaming=true", "data.max_bytes=0", "data.partition=iid", "data.seq_len=15",
        "data.batch_size=4", "evaluation.sequences=10",
    ]  # fmt: skip
    return load("quickstart", words)


def epoch(part: DomainShare, number: int = 0, seed: int = 0) -> list[str]:
    """Return the documents of one pass over a share."""
    documents = DocumentStream(part, [seed], epoch=number)
    return [*takewhile(lambda _: documents.epoch == number, documents)]


def text_of(batch: Any) -> str:
    return bytes(batch.tokens.flatten().tolist()).decode()


# --------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize("partition", ["iid", "by_domain"])
@pytest.mark.parametrize("num_clients", [1, 3, 4, 7])
def test_no_document_is_seen_by_two_clients_and_none_is_missed(source, partition, num_clients):
    seen: Counter[str] = Counter()
    for client in range(num_clients):
        for part in client_shares(source, WEIGHTS, partition, Site(client, num_clients)):
            seen.update(epoch(part, seed=client))
    heldout = [t for name in "abc" for t in open_domain(source, name).heldout()]
    assert set(seen.values()) == {1}
    everything = read(replace(source, streaming=False))
    assert sorted([*seen, *heldout]) == sorted(
        [*everything.train["text"][:], *everything.heldout["text"][:]]
    )


def test_the_next_pass_has_the_same_documents_in_another_order_and_one_line_says_so(source, caplog):
    part = DomainShare(source, "b", 0, 1, 1.0)
    with caplog.at_level(logging.WARNING):
        first = epoch(part)
    (line,) = caplog.messages
    assert "part 0 of 1 of domain 'b' has been read; it begins again, for pass 2" in line
    second = epoch(part, 1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert epoch(part, 1) == second


def test_further_passes_are_said_at_doublings(tmp_path, caplog):
    source = Source(str(write(tmp_path / "one.jsonl", ["one"] * 3)), streaming=True)
    stream = DocumentStream(DomainShare(source, "one", 0, 1, 1.0), [0])
    assert [*islice(stream, 3 * 700)] == ["one"] * 3 * 700
    said = [int(line.rpartition(" ")[2]) for line in caplog.messages]
    assert said == [2, 4, 8, 16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_reading_goes_on_where_it_was_left(source, name):
    part = DomainShare(source, name, 1, 3, 1.0)
    documents = DocumentStream(part, [0])
    texts = iter(documents)
    for _ in range(12):
        next(texts)
        kept = json.loads(json.dumps(documents.state()))
    rest = [next(texts) for _ in range(70)]  # into the next pass
    again = iter(DocumentStream(part, [0], **kept))
    assert [next(again) for _ in range(70)] == rest


def test_plain_text_that_is_held_out_is_not_trained_on(tmp_path):
    write(tmp_path / "t.txt", prose("t", 3000))  # more than `datasets` reads at a time
    write(tmp_path / "u.txt", prose("u", 700))
    source = replace(Source("builtin", streaming=True).at_site(tmp_path), validation_fraction=0.3)
    (part,) = client_shares(source, [], "iid", Site(0, 1, tmp_path))
    train, heldout = epoch(part), [*open_domain(source, tmp_path.name).heldout()]
    assert 0.2 < len(heldout) / (len(train) + len(heldout)) < 0.4
    words = {text for document in [*train, *heldout] for text in document.split("\n\n")}
    assert words == {*prose("t", 3000), *prose("u", 700)}
    assert not {*train} & {*heldout}


def test_a_part_without_text(source):
    (part, *_) = client_shares(source, WEIGHTS, "iid", Site(500, 1000))
    with pytest.raises(ValueError, match=r"domain 'a' has no document for part 500 of 1000"):
        next(iter(DocumentStream(part, [0])))


# ------------------------------------------------------------------------------------- sequences


def test_a_batch_is_the_same_whatever_is_left_of_the_cache(config, cache):
    def client() -> Any:
        forget()
        return CausalLM(config).client_data(Site(1, 2))

    later = 3 * BLOCK // 4 + 100
    data = client()
    first, second = data.train_batch(5).tokens, data.train_batch(later).tokens
    (last,) = cache.rglob("00000003.safetensors")
    last.unlink()
    assert torch.equal(client().train_batch(later).tokens, second)  # from the state before it
    for number in (3, 2, 0):  # as a killed process leaves them
        (path,) = cache.rglob(f"{number:08d}.safetensors")
        path.write_bytes(path.read_bytes()[:-9])
    (path.parent / "tmp1").mkdir()
    (path.parent / "tmp1" / "block").write_bytes(b"half")
    again = client()
    assert again.description == data.description
    assert torch.equal(again.train_batch(later).tokens, second)
    lose(cache)
    assert torch.equal(client().train_batch(later).tokens, second)  # from the beginning
    assert torch.equal(client().train_batch(5).tokens, first)


def test_sequences_are_whole_documents_one_after_the_other_in_their_weights(config, source):
    data = CausalLM(config).client_data(Site(0, 2))
    batches = [data.train_batch(step) for step in range(2 * BLOCK // 4 + 1)]
    assert all(batch.num_bytes == 4 * 15 for batch in batches)  # One token a byte.
    text = "".join(map(text_of, batches))
    found = text.split("\n\n")[:-1]
    mine = {
        part.domain: {*epoch(part)} for part in client_shares(source, WEIGHTS, "iid", Site(0, 2))
    }
    sizes = Counter({name: sum(len(t) for t in found if t in mine[name]) for name in mine})
    assert {*found} <= set().union(*mine.values())
    for name, weight in zip("abc", WEIGHTS, strict=True):
        assert sizes[name] / sizes.total() == pytest.approx(weight / 10, abs=0.01)


def test_equal_shares_are_the_default(config):
    config = with_values(config, {"data": replace(config.data, weights=[])})
    held = CausalLM(config).client_data(Site(0, 1)).description
    assert max(held.values()) < 1.1 * min(held.values())


def test_old_blocks_go_and_come_again(config, cache, monkeypatch):
    monkeypatch.setattr(streaming, "KEPT_BLOCKS", 2)
    data = CausalLM(config).client_data(Site(0, 2))
    first = data.train_batch(0)
    data.train_batch(5 * BLOCK // 4)
    assert {int(p.stem) for p in cache.rglob("*.safetensors")} == {0, 4, 5}
    assert torch.equal(data.train_batch(0).tokens, first.tokens)
    second = data.train_batch(BLOCK // 4)
    assert not torch.equal(second.tokens, first.tokens)


def test_two_that_pack_one_clients_text_at_once_do_not_disturb_each_other(config, cache):
    wanted = CausalLM(config).client_data(Site(1, 2))
    steps = range(0, 6 * BLOCK // 4, 150)
    tokens = [wanted.train_batch(step).tokens for step in steps]
    lose(cache)

    def pack(_: int) -> list[torch.Tensor]:
        data = CausalLM(config).client_data(Site(1, 2))
        return [data.train_batch(step).tokens for step in steps]

    with ThreadPoolExecutor(4) as pool:  # Like four processes that share the files.
        for found in pool.map(pack, range(4)):
            assert all(map(torch.equal, found, tokens))
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".safetensors"}


def test_files_that_have_changed_are_read_anew(config, tmp_path):
    def first() -> str:
        forget()
        return text_of(CausalLM(config).client_data(Site(0, 1)).train_batch(0))

    config = with_values(
        config, {"data": replace(config.data, source=str(tmp_path), domains=["a"], weights=[])}
    )
    write(tmp_path / "a.jsonl", prose("old"))
    assert "old" in first()
    write(tmp_path / "a.jsonl", prose("new"))
    assert "new" in first()


def test_a_disk_that_is_full_is_named(config, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streaming, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write packed text to .* or name .* XDG_CACHE_HOME"):
        CausalLM(config).client_data(Site(0, 1))


# ------------------------------------------------------------------------------------- evaluation


def test_held_out_text_is_bounded_and_of_the_clients_domains_in_their_weights(config):
    task = CausalLM(config)
    heldout = task.heldout()
    assert [*heldout] == ["a", "b", "c"]
    assert all(sum(len(batch.tokens) for batch in each) == 10 for each in heldout.values())
    assert all("kept" in text_of(batch) for batch in islice(task.heldout()["c"], 1))
    config = with_values(config, {"data": replace(config.data, partition="by_domain")})
    mixture, _, only = (CausalLM(config).client_data(Site(i, 3)).heldout() for i in range(3))
    assert sum(len(batch.tokens) for batch in mixture) == 10
    assert sum(len(batch.tokens) for batch in only) == 10
    assert torch.equal(next(iter(only)).tokens, next(iter(task.heldout()["c"])).tokens)


def test_a_sites_private_files_are_one_stream(config, tmp_path):
    for number in range(3):
        write(tmp_path / f"part-{number}.parquet", prose(f"own{number}", 20 * (number + 1)))
    data = CausalLM(config).client_data(Site(0, 1, tmp_path))
    assert data.description.keys() == {tmp_path.name}
    text = "".join(text_of(data.train_batch(step)) for step in range(BLOCK // 4))
    assert all(f"own{number}" in text for number in range(3))
    assert "own" in text_of(next(iter(data.heldout())))


def test_a_run_that_was_cut_off_and_has_lost_its_cache_ends_the_same(folder, tmp_path, cache):
    words = [
        *TINY, f"data.source={folder}", "data.domains=[a,b,c]", "data.weights=[5,3,2]",
        "data.streaming=true", "data.max_bytes=0", "data.batch_size=128", "run.steps=12",
        "run.eval_every=0", "sync.params=3", "sync.exp_avg=6", "sync.exp_avg_sq=12",
    ]  # fmt: skip

    def run(name: str, *overrides: str) -> dict[str, Any]:
        lose(cache)
        return summary(train(tmp_path / name, *words, *overrides))

    whole = run("whole")
    with failing_at(4):  # after step 9, in the second block
        run("cut")
    resumed = run("cut", "run.resume=auto")
    assert resumed["resumed"][0]["step"] == 9
    for name in ("weights_sha256", "train_loss"):
        assert resumed[name] == whole[name]


# ---------------------------------------------------------------------------------------- network


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Serve a file over HTTP; while ``down`` is positive, decrement it and answer 503."""
    folder = write(tmp_path / "served" / "a.jsonl", prose("web", 400)).parent

    class Handler(SimpleHTTPRequestHandler):
        down = 0
        url = ""

        def send_head(self) -> Any:
            if Handler.down > 0:
                Handler.down -= 1
                self.send_error(503)
                return None
            return super().send_head()

        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        Handler.url = f"http://127.0.0.1:{httpd.server_port}/a.jsonl"
        yield Handler
        httpd.shutdown()


def test_a_server_that_fails_for_a_while_is_asked_again(server, config, cache, monkeypatch, caplog):
    def units(_: Source) -> dict[str, Domain]:
        def web() -> Any:
            return datasets.load_dataset("json", data_files=[server.url], streaming=True)["train"]

        return {"a": Domain(web, None, lambda: OpenFiles(shards_of("a", web()), "", ""))}

    monkeypatch.setattr(document_streams, "domains_of", units)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    config = with_values(config, {"data": replace(config.data, domains=["a"], weights=[])})
    data = CausalLM(config).client_data(Site(0, 1))
    wanted = [data.train_batch(step).tokens for step in (300, 600, 900)]

    lose(cache)
    data = CausalLM(config).client_data(Site(0, 1))
    assert torch.equal(data.train_batch(300).tokens, wanted[0])
    data = CausalLM(config).client_data(Site(0, 1))
    server.down = 2
    with caplog.at_level(logging.WARNING):
        assert torch.equal(data.train_batch(600).tokens, wanted[1])
    lines = [line for line in caplog.messages if "cannot be reached" in line]
    assert lines
    assert all(re.search(r"^data.source=.*; try [23] of 3 in 0 s$", line) for line in lines)

    data = CausalLM(config).client_data(Site(0, 1))
    server.down = 1000
    with pytest.raises(ConnectionError, match=r"gave up after 3 tries. Check .* HF_HUB_OFFLINE=1"):
        data.train_batch(900)
    server.down = 0
    assert torch.equal(data.train_batch(900).tokens, wanted[2])


def failing(times: int, error: Exception) -> Any:
    left = iter(range(times))

    def act() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return act


def test_a_refusal_or_a_network_that_is_not_to_be_used_is_not_asked_again(monkeypatch):
    # Only the status is read, not the request.
    refusal = aiohttp.ClientResponseError(None, (), status=404)  # type: ignore[arg-type]
    for error in (FileNotFoundError("x"), refusal, ValueError("x")):
        with pytest.raises(type(error)):
            retry_network("it", failing(1, error))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"^gone$"):
        retry_network("it", failing(1, ConnectionError("gone")))


def test_a_hub_that_cannot_be_reached_at_first(tmp_path, monkeypatch, caplog):
    names = datasets.get_dataset_config_names
    fail = failing(2, ConnectionError("Couldn't reach the Hub"))
    monkeypatch.setattr(sources, "get_dataset_config_names", lambda name: fail() and names(name))
    write(tmp_path / "one" / "train.jsonl", prose("one"))
    write(tmp_path / "two" / "train.parquet", prose("two"))
    first, second = tmp_path / "one", tmp_path / "two"
    source = Source(f"{first}:default", ("default", f"{second}:default"), streaming=True)
    assert domain_names(source) == source.domains
    assert len(caplog.messages) == 2
    held = [epoch(part) for part in client_shares(source, [], "iid", Site(0, 1))]
    assert [texts[0][:3] for texts in held] == ["one", "two"]


# ------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "dirichlet"}, "data.partition=dirichlet: text that is read as it is"),
        ({"domain_field": "x"}, "data.domain_field=x: with data.streaming=true"),
        ({"weights": [1.0]}, r"data.weights=\[1.0\]: needs one for each of data.domains"),
        ({"weights": [1.0, 0.0, 1.0]}, "data.weights=.*: all must be above 0"),
        ({"max_bytes": 9}, "data.weights=.*: needs data.streaming=true and data.max_bytes=0"),
    ],
)
def test_settings_that_cannot_be(config, changes, message):
    config = with_values(config, {"data": replace(config.data, **changes)})
    with pytest.raises(ConfigError, match=f"^{message}"):
        check(config)
