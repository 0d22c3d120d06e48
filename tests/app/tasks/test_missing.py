"""Rows without a label, domain, text or image, and files without rows."""

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import desloc
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Picture
from test_text import prose

from flower_desloc.app.tasks.causal_lm.corpus import read as read_text
from flower_desloc.app.tasks.causal_lm.document_streams import (
    DocumentStream,
    DomainShare,
    open_domain,
)
from flower_desloc.app.tasks.empty_files import _warn_once
from flower_desloc.app.tasks.image_classification.sources import read as read_images
from flower_desloc.app.tasks.source import Source

PIXELS = np.arange(60 * 16).reshape(60, 4, 4) % 251
ROWS = List(List(Value("int64")))


@pytest.fixture(autouse=True)
def said_anew() -> None:
    _warn_once.cache_clear()


def images(path: Path, column: str, values: list[Any], kind: Any) -> Path:
    rows: dict[str, list[Any]] = {"image": PIXELS.tolist(), "label": [n % 3 for n in range(60)]}
    rows[column] = values
    features = Features({"image": ROWS, "label": Value("int64"), column: kind})
    Dataset.from_dict(rows, features).to_parquet(path)
    return path


def labels(*first: Any, others: tuple[Any, ...]) -> list[Any]:
    return [*first, *(others[n % len(others)] for n in range(60 - len(first)))]


THREE = ClassLabel(names=["a", "b", "c"])
# The values of a column, of which some are missing; its type; how many; the labels that are left.
LACKING: dict[str, tuple[str, list[Any], Any, int, list[str]]] = {
    "text": ("label", labels(None, None, others=("x", "y")), Value("string"), 2, ["x", "y"]),
    "blank": ("label", labels("", " ", None, others=("x", "y")), Value("string"), 3, ["x", "y"]),
    "integers": ("label", labels(None, others=(9, 10)), Value("int64"), 1, ["9", "10"]),
    "NaN": ("label", labels(float("nan"), others=(9.0, 10.0)), Value("float64"), 1, ["9", "10"]),
    "floats": ("label", labels(None, others=(0.5, 2.0)), Value("float32"), 1, ["2", "0.5"]),
    "class labels": ("label", labels(None, -1, others=(0, 1)), THREE, 2, ["a", "b", "c"]),
    "images": ("image", [None, *PIXELS[1:].tolist()], ROWS, 1, ["0", "1", "2"]),
}


@pytest.mark.parametrize("kind", LACKING)
def test_images_without_a_label_or_an_image_are_refused_with_their_number(kind, tmp_path, caplog):
    column, values, feature, count, names = LACKING[kind]
    source = str(images(tmp_path / "a.parquet", column, values, feature))
    what = rf"of 60 rows {count} have no '{column}' \(data\.{column}_field\)"
    with pytest.raises(ValueError, match=rf"{what}; .* data\.drop_missing=true$"):
        read_images(Source(source, label_field="label"))
    assert not caplog.messages
    corpus = read_images(Source(source, label_field="label", drop_missing=True))
    assert [*corpus.names] == names
    assert len(corpus.train) + len(corpus.heldout) == 60 - count
    (line,) = caplog.messages
    assert f"{count} have no '{column}'" in line
    assert line.endswith("and are left out (data.drop_missing=true)")


def test_encoded_images_that_are_missing_are_refused(tmp_path):
    pictures = [None, *(Picture.fromarray(np.uint8(pixels)) for pixels in PIXELS[1:])]
    path = images(tmp_path / "a.parquet", "image", pictures, Image())
    with pytest.raises(ValueError, match="of 60 rows 1 have no 'image'"):
        read_images(Source(str(path)))


def test_a_run_with_missing_labels_ends_with_one_sentence(tmp_path):
    path = images(tmp_path / "a.parquet", *LACKING["text"][:3])
    words = ["digits", f"data.source={path}", "--engine", "inprocess", "--output-dir", tmp_path]
    result = desloc("run", *words)
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if line.startswith("error: "))
    assert "of 60 rows 2 have no 'label' (data.label_field); complete or remove them" in line


def text(path: Path, **columns: list[Any]) -> Source:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return Source(str(path))


@pytest.mark.parametrize(
    ("domains", "names"),
    [([None, "a", "b"], ["a", "b"]), (["", "a", "b"], ["a", "b"]), ([None, 1, 2], ["1", "2"])],
)
def test_text_without_a_domain_is_refused_with_its_number(domains, names, tmp_path):
    source = text(tmp_path / "a.jsonl", text=prose("a", 60), site=domains * 20)
    by_site: dict[str, Any] = {"domain_field": "site", "source": source.source}
    with pytest.raises(ValueError, match=r"of 60 rows 20 have no 'site' \(data\.domain_field\); "):
        read_text(Source(**by_site))
    corpus = read_text(Source(**by_site, drop_missing=True))
    assert [*corpus.domains] == names
    assert len(corpus.train) + len(corpus.heldout) == 40


def test_rows_without_a_text_are_refused_and_blank_ones_are_empty_documents(tmp_path):
    source = text(tmp_path / "a.jsonl", text=[None, "", " ", *prose("a", 57)])
    with pytest.raises(ValueError, match=r"of 60 rows 1 have no 'text' \(data\.text_field\); "):
        read_text(source)
    corpus = read_text(Source(source.source, drop_missing=True))
    assert len(corpus.train) + len(corpus.heldout) == 57


@pytest.mark.parametrize("drop", [False, True])
def test_streamed_rows_without_a_text_do_not_end_a_run(drop, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    text(path, text=[*prose("a", 20), *[None] * 5])
    source = Source(str(path), streaming=True, drop_missing=drop)
    documents = {*islice(DocumentStream(DomainShare(source, "a", 0, 1, 1.0), [0]), 15)}
    assert documents < {*prose("a", 20)}
    [*open_domain(source, "a").heldout()]
    said = [line for line in caplog.messages if "without a text in 'text'" in line]
    assert [line.split(" so far")[0].rpartition(" ")[2] for line in said] == (
        [] if drop else ["1", "2", "4"]
    )


def test_held_out_labels_and_domains_that_no_one_trains_on_are_named(tmp_path, caplog):
    (tmp_path / "images").mkdir()
    for part, others in (("train", ("a", "b")), ("test", ("a", "c"))):
        path = tmp_path / "images" / f"{part}.parquet"
        images(path, "label", labels(others=others), Value("string"))
    read_images(Source(str(tmp_path / "images")))
    assert caplog.messages[0].endswith("labels of held-out images only, never trained on: c")
    (tmp_path / "text").mkdir()
    for part, others in (("train", ("a", "b")), ("test", ("a", "c"))):
        text(tmp_path / "text" / f"{part}.jsonl", text=prose(part, 60), site=labels(others=others))
    read_text(Source(str(tmp_path / "text"), domain_field="site"))
    assert caplog.messages[1].endswith("domains with held-out text only are left out: c")


# -------------------------------------------------------------------------------------- empty files


def no_rows(path: Path, columns: list[str]) -> None:
    pq.write_table(pa.table({column: pa.array([], pa.string()) for column in columns}), path)


EMPTY: dict[str, Callable[[Path], object]] = {
    "b.parquet": lambda path: no_rows(path, ["text"]),
    "c.parquet": lambda path: path.write_bytes(b""),
    "b.txt": lambda path: path.write_text(""),
    "c.txt": lambda path: path.write_text(" \n\n"),
    "b.jsonl": lambda path: path.write_text(""),
    "b.json": lambda path: path.write_text("[]\n"),
    "b.txt.gz": lambda path: path.write_bytes(gzip.compress(b"")),
    "b.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b"\n")),
}


def streamed(source: Source) -> int:
    domain = open_domain(source, "site")
    parts = [domain.texts(n, domain.open_shard(n), train=True) for n in range(len(domain.shards))]
    return sum(1 for part in parts for _ in part) + sum(1 for _ in domain.heldout())


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("domain", [".", "site", "other"])
def test_an_empty_file_among_others_is_skipped_and_named_once(name, domain, tmp_path, caplog):
    (tmp_path / "text" / "site").mkdir(parents=True)
    text(tmp_path / "text" / "site" / "a.jsonl", text=prose("a", 60))
    file = tmp_path / "text" / domain / name
    file.parent.mkdir(exist_ok=True)
    EMPTY[name](file)
    path = str(tmp_path / "text")
    corpus = read_text(Source(path))
    assert corpus.domains == ("site",)
    assert len(corpus.train) + len(corpus.heldout) == 60
    assert streamed(Source(path, streaming=True)) == 60
    named = f"empty files are skipped: {file}"
    assert {line.partition(": ")[2] for line in caplog.messages} == {named}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", EMPTY)
def test_a_source_of_empty_files_is_refused(name, tmp_path):
    EMPTY[name](tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"all of its files are empty: .*{name}$"):
            read_text(Source(str(path)))


def test_empty_files_of_images_are_skipped_and_named(tmp_path, caplog):
    folder = tmp_path / "images"
    folder.mkdir()
    images(folder / "train-1.parquet", *LACKING["integers"][:3])
    no_rows(folder / "train-0.parquet", ["image", "label"])
    no_rows(folder / "test.parquet", ["image", "label"])
    corpus = read_images(Source(str(folder), drop_missing=True))
    assert len(corpus.train) + len(corpus.heldout) == 59
    assert "test.parquet" in caplog.messages[0]
    assert "train-0.parquet" in caplog.messages[0]
    with pytest.raises(ValueError, match=r"all of its files are empty: .*test\.parquet$"):
        read_images(Source(str(folder / "test.parquet")))


def test_an_empty_file_in_a_folder_of_image_files_is_skipped(tmp_path, caplog):
    for number, pixels in enumerate(PIXELS):
        folder = tmp_path / "images" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Picture.fromarray(np.uint8(pixels)).save(folder / f"{number}.png")
    (tmp_path / "images" / "0" / "0.png").write_bytes(b"")
    corpus = read_images(Source(str(tmp_path / "images")))
    assert len(corpus.train) + len(corpus.heldout) == 59
    assert "0.png" in caplog.messages[0]
