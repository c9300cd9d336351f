# SPDX-License-Identifier: Apache-2.0
"""Documents of a user's files and of the offline corpus, and their split."""

import ast
import errno
import json
import os
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetjax.data.building import parts_of
from hetjax.data.sources import corpus
from hetjax.data.splitting import Outline, outline, split
from hetjax.errors import BadInput

_ALLOWED = (
    "allowed: a UTF-8 .txt file, a .jsonl, .json, .csv or .parquet file, each but the "
    "last also as .gz or .zst, or a folder of such files\n"
)
_ALLOWED_LINE = (
    'allowed: rows of one of the forms {"text": ...}, {"prompt": ..., "completion": '
    '...}, {"messages": [{"role": ..., "content": ...}, ...]}, {"conversations": '
    '[{"from": ..., "value": ...}, ...]} or {"instruction": ..., "output": ...}\n'
)
_FIX_JSON = (
    "allowed: one JSON object in each line (.jsonl), or an array of them (.json)\n"
    "fix: correct or delete it"
)
_FIX_LINE = (
    "fix: name the column of the text with --data.column, or correct or delete the "
    'row; a valid one is {"text": "Once upon a time"}'
)


def _outline(path: Path) -> Outline:
    source = corpus.files(path)
    return outline(source.name, source.rows())


def _read(path: Path) -> list[Any]:
    return list(_outline(path).distinct(corpus.files(path).rows()))


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Return the training texts and the held-out texts."""
    source = corpus.Source(name="", identity={}, rows=lambda: iter(documents))
    found = outline("", documents)
    parts = parts_of(source, found, split(found))
    train, aside = (list(parts.rows(is_aside)) for is_aside in (False, True))
    return train, aside  # pyright: ignore[reportReturnType]


def _message(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        _read(path)
    return str(caught.value)


def test_two_blank_lines_part_the_documents_of_a_txt_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\n\nstill one\n\n\ntwo\r\n \t\r\n\r\n\r\n\r\n  three\n\n")
    assert _read(path) == ["one\n\nstill one", "two", "  three"]


def test_a_txt_file_without_blank_line_groups_is_one_document(tmp_path):
    path = tmp_path / "own.txt"
    text = Path(corpus.__file__).read_text().replace("\n\n\n", "\n\n")
    path.write_text(text)
    assert _read(path) == [text.rstrip("\n")]


def test_a_jsonl_file_gives_the_text_of_each_line(tmp_path):
    texts = ["one", "two\nlines", "sep\u2028arator \u00e9 \U0001f600", "  four "]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"id": 1, "text": t}, ensure_ascii=False) for t in texts]
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n", encoding="utf-8")
    assert _read(path) == texts


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    assert _read(tmp_path) == ["one", "two"]


def test_a_folder_is_read_in_sorted_order_with_its_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.TXT").write_text("bee")
    (tmp_path / "sub" / "c.txt").write_text("sea")
    (tmp_path / "a.jsonl").write_text('{"text": "ay"}')
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert _read(tmp_path) == ["ay", "bee", "sea"]


def test_other_files_in_a_folder_are_left_out_with_one_warning(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for name in ("notes.md", "image.png"):
        (tmp_path / name).write_text("other")
    with pytest.warns(UserWarning) as caught:
        source = corpus.files(tmp_path)
    assert list(source.rows()) == ["text"]
    assert [str(w.message) for w in caught] == [
        f"{tmp_path}: 2 files of other types are left out; the first: image.png"
    ]


def test_the_identity_follows_names_and_content_only(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same")
    first, second = (corpus.files(tmp_path / f).identity for f in "xy")
    assert first == second
    (tmp_path / "y" / "a.txt").write_text("Same")
    assert corpus.files(tmp_path / "y").identity != first


def test_duplicates_and_blank_documents_are_dropped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["one", "two", "one", "  \n", "one"]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    assert _read(path) == ["one", "two"]
    assert _outline(path).num_duplicates == 2


def test_a_missing_path_is_refused(tmp_path):
    assert _message(tmp_path / "no.txt") == (
        f"got: no file or folder at {tmp_path}/no.txt\n{_ALLOWED}"
        "fix: correct --data.path, or leave it out for the offline corpus"
    )


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("book.epub", b"text", "if it is plain text: mv {path} {folder}/book.txt"),
        (
            "notes",
            "caf\u00e9".encode(),
            "if it is plain text: mv {path} {folder}/notes.txt",
        ),
        (
            "rows.dat",
            b' [{"text": "a"}]',
            "if it is JSON: mv {path} {folder}/rows.json",
        ),
        ("rows.dat", b'{"text": "a"}', "if it is JSON: mv {path} {folder}/rows.json"),
        ("page.html", b"text", None),
        ("page.dat", b"<html>", None),
        ("rows.yaml", b"- a", None),
        ("book.pdf", b"%PDF\0", None),
        ("rows.bin.gz", b"text", None),
    ],
)
def test_an_unknown_suffix_is_refused_and_no_syntax_is_advised(
    tmp_path, name, content, fix
):
    path = tmp_path / name
    path.write_bytes(content)
    if fix is None:
        fix = (
            'write its text to a .txt file, or to a .jsonl file of {{"text": ...}} rows'
        )
    assert _message(path) == (
        f"got: {path} has the suffix {path.suffix!r}\n{_ALLOWED}"
        f"fix: {fix.format(path=path, folder=tmp_path)}"
    )


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    assert "is a pipe or a device" in _message(path)


def test_a_folder_without_text_files_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("text")
    assert _message(tmp_path) == (
        f"got: folder {tmp_path} holds no file of text or rows (1 other files)\n"
        f"{_ALLOWED}fix: point --data.path at a folder with text files"
    )


def test_a_file_without_read_permission_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(path: Path, flags: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)  # chmod would not stop root
    assert _message(path) == (
        f"got: {path} cannot be read (Permission denied)\n{_ALLOWED}"
        "fix: make it readable (chmod u+r FILE) or choose another --data.path"
    )


@pytest.mark.parametrize("content", ["", "\n\n", " \t\n", "a"])
def test_an_empty_corpus_is_refused(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text(content)
    assert _message(path) == (
        f"got: {path} holds no text ({len(content.strip())} documents)\n"
        "allowed: at least two characters of text that is not blank\n"
        "fix: point --data.path at a file with text, or leave it out"
    )


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"text": "a"', "is not JSON: Expecting ',' delimiter at column 13"),
        ("plain text", "is not JSON: Expecting value at column 1"),
        pytest.param("[" * 100_000, "is not JSON: nested deeper than 64\n", id="deep"),
        ('["text"]', "is a list, not an object\n"),
        ('{"id": 1, "body": "a"}', "has no field 'text' (its fields: 'id', 'body')\n"),
        ("{}", "has no field 'text' (its fields: none)\n"),
        ('{"text": 5}', "holds a number in 'text', not a string\n"),
        ('{"text": "\\ud800"}', "is not JSON: half a surrogate pair"),
        ('{"text": "a", "text": "b"}', "is not JSON: key 'text' 2 times in one object"),
    ],
)
def test_a_broken_jsonl_line_is_refused_by_its_number(tmp_path, line, got):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    message = _message(path)
    assert message.startswith(f"got: {path} line 3 {got}")
    last = _FIX_JSON if "is not JSON" in got else f"{_ALLOWED_LINE}{_FIX_LINE}"
    assert message.endswith(f"\n{last}")


def test_text_that_is_not_utf8_is_refused_by_its_place(tmp_path):
    txt, jsonl = tmp_path / "a.txt", tmp_path / "b.jsonl"
    txt.write_bytes("caf\u00e9".encode("latin1"))
    jsonl.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    rest = (
        "allowed: text encoded as UTF-8\n"
        "fix: convert the file, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW"
    )
    assert _message(txt) == f"got: {txt} is not UTF-8 (byte 0xe9 at offset 3)\n{rest}"
    assert _message(jsonl) == (
        f"got: {jsonl} line 2 is not UTF-8 (byte 0xff at offset 10)\n{rest}"
    )


_DOCUMENTS = st.lists(
    st.text(min_size=1, max_size=200).filter(str.strip), min_size=1, unique=True
).filter(lambda documents: sum(map(len, documents)) > 1)


@settings(max_examples=150, deadline=None)
@given(_DOCUMENTS)
@example(["2", "02"])
def test_a_split_loses_nothing_shares_nothing_and_has_no_empty_side(documents):
    train, aside = _split(documents)
    assert train and aside
    whole = set(documents)
    heads = [text for text in train if text not in whole]
    tails = [text for text in aside if text not in whole]
    assert len(heads) <= 1 and len(tails) <= 1
    # a tail may equal another document, so any pair may be the document that was cut
    cut = {head + tail for head in train for tail in aside}
    kept = {*train, *aside} | cut
    assert whole <= kept
    joined = len("".join(train) + "".join(aside))
    assert joined == len("".join(documents))


@settings(max_examples=30, deadline=None)
@given(_DOCUMENTS, st.randoms())
def test_a_split_depends_on_the_documents_and_not_on_their_order(documents, random):
    mixed = random.sample(documents, len(documents))
    one, other = _split(documents), _split(mixed)
    assert [sorted(side) for side in one] == [sorted(side) for side in other]


def test_many_documents_give_one_percent_whole_documents_and_keep_their_order():
    documents = [f"{i:05} " * 400 for i in range(10_000)]
    train, aside = _split(documents)
    assert len(aside) == 100
    assert sorted(train) == list(train)
    assert sorted(train + aside) == documents


def test_one_long_document_gives_its_tail_from_a_line_start():
    text = "".join(f"line {i}\n" for i in range(2_000_000))
    train, aside = _split([text])
    assert "".join(train + aside) == text
    assert aside[0].startswith("line ")
    assert 0.0099 < len(aside[0]) / len(text) < 0.0101


def test_a_small_text_gives_a_tenth():
    text = "".join(f"line {i}\n" for i in range(5_000))
    train, aside = _split([text])
    assert 0.099 < len(aside[0]) / len(text) < 0.102


def test_the_offline_corpus_opens_with_the_language_reference():
    opening = list(islice(corpus.offline_documents(), len(topics)))
    assert opening == [topics[name] for name in sorted(topics)]


def test_the_offline_corpus_goes_on_with_long_docstrings_of_packages():
    after = list(islice(corpus.offline_documents(), len(topics), None))
    first = Path(ast.__file__).parent / "__future__.py"
    assert after[0] == ast.get_docstring(ast.parse(first.read_bytes()))
    assert all(len(text) > 200 for text in after)
    api = ast.parse((Path(jax.__file__).parent / "_src" / "api.py").read_bytes())
    (vmap,) = (
        f for f in api.body if isinstance(f, ast.FunctionDef) and f.name == "vmap"
    )
    assert ast.get_docstring(vmap) in after


def test_the_offline_identity_names_every_version():
    packages = corpus.offline().identity["packages"]
    names = {"python", "numpy", "scipy", "jax", "flax", "optax", "orbax-checkpoint"}
    assert set(packages) == names
