"""What `--data` points at: nothing is lost in silence, and hostile files are refused by name."""

import json
import struct
import zlib

import pytest
from PIL import Image

from oversmooth.data import raw as json_rows
from oversmooth.data.raw import lines, open_picture, paragraphs, read_raw
from oversmooth.errors import UnreadableData
from tests.command_line import oversmooth


def given(path, kind="text", *, per_line=False):
    return read_raw(str(path), kind, per_line=per_line)


def test_lines_of_white_space_are_blank():
    assert paragraphs("one\ntwo\n \nthree\n\t\n\u00a0\nfour") == ["one\ntwo", "three", "four"]


def test_blank_lines_at_both_ends_make_no_paragraph():
    assert paragraphs("\n \n one \n\n") == ["one"]
    assert paragraphs(" \n\t\n") == []


def test_lines_can_be_texts():
    assert lines("one\n \n two \nthree") == ["one", "two", "three"]


def test_per_line_holds_for_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    assert list(given(tmp_path / "a.txt", per_line=True).items) == ["one", "two", "three"]
    assert list(given(tmp_path, per_line=True).items) == ["one", "two", "three"]
    assert list(given(tmp_path).items) == ["one\ntwo\n\nthree"]


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert list(given(tmp_path / "a.txt").items) == ["one"]


def test_windows_line_ends_are_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n \r\ntwo\r\n")
    assert list(given(tmp_path / "a.txt").items) == ["one", "two"]


def test_rows_without_text_are_left_out_and_counted(tmp_path):
    rows = [{"text": None, "n": 1}, {"text": "one", "n": 2}, {"text": "  ", "n": 3}, {"text": "two", "n": 4}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = given(tmp_path / "a.jsonl")
    assert list(found.items) == ["one", "two"]
    assert found.empty == 2


def test_a_table_without_text_names_its_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": 1, "b": None}) + "\n")
    with pytest.raises(UnreadableData, match="a column with text, found the columns a, b"):
        given(tmp_path / "a.jsonl")


def test_an_empty_table_has_no_rows(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(UnreadableData, match="no rows"):
        given(tmp_path / "a.csv")


def parquet_of(path, cells):
    import datasets

    features = datasets.Features({"img": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
    rows = {"img": [None if cell is None else {"bytes": cell, "path": None} for cell in cells]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


def png(width, height):
    """A picture file whose header says any size and whose content is nearly nothing."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_broken_image_in_a_table_is_named_by_its_row(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")
    good = (tmp_path / "good.png").read_bytes()
    path = parquet_of(tmp_path / "x.parquet", [good, None, b"broken", good])
    found = given(path, "image")
    assert next(found.items).size == (4, 4)
    with pytest.raises(UnreadableData, match=r"x\.parquet, row 2.*an image"):
        next(found.items)
    assert found.empty == 1


@pytest.mark.parametrize(
    ("size", "piece"),
    [
        ((60_000, 60_000), "at most 100,000,000 pixels"),
        ((12_000, 9_000), "12000 x 9000"),
        ((60_000, 1), "sides differ"),
    ],
)
def test_an_image_that_would_unpack_to_too_much_is_refused_by_its_header(size, piece):
    with pytest.raises(UnreadableData, match=piece):
        open_picture(png(*size), "x.png")


def test_a_truncated_image_is_named(tmp_path):
    (tmp_path / "x.png").write_bytes(png(8, 8))
    with pytest.raises(UnreadableData, match=r"x\.png.*an image"):
        next(given(tmp_path, "image").items)


@pytest.mark.parametrize("name", ["nope.txt", "./nope", "sub/nope/deeper", "~/nope-nope", "nope nope"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    import datasets

    def asked(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", asked)
    with pytest.raises(UnreadableData, match="none of that name"):
        given(name)


def test_files_of_nearly_that_name_are_suggested(tmp_path):
    (tmp_path / "notes.txt").write_text("one two")
    with pytest.raises(UnreadableData, match=r"close: notes\.txt"):
        given(tmp_path / "note.txt")


def test_a_device_is_no_data():
    with pytest.raises(UnreadableData, match="device"):
        given("/dev/zero")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udcff.txt"])
def test_names_that_no_file_can_have_are_refused(name):
    with pytest.raises(UnreadableData, match=r"too long|null|surrogates|none of that name"):
        given(name)


def test_a_seed_beyond_64_bits_is_refused_on_the_command_line():
    done = oversmooth("measure", "--seed", 2**64)
    assert done.returncode == 2
    assert "--seed" in done.stderr


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_json_nested_beyond_the_stack_of_its_reader_is_refused(name, tmp_path):
    (tmp_path / name).write_text('{"text": "the cat"}\n{"text": ' + "[" * 100_000)
    with pytest.raises(UnreadableData, match="JSON nested too deeply"):
        read_raw(str(tmp_path / name), "text", per_line=False)


@pytest.mark.parametrize(
    "text", ['null\n{"text": "a"}\n', '["a"]', '[{"text": "a"}, null]', '"a"\n', '\ufeff{"text": "a"}']
)
def test_json_rows_that_end_the_process_in_pyarrow_or_come_in_other_forms_are_read(text, tmp_path):
    (tmp_path / "x.jsonl").write_text(text)
    assert list(given(tmp_path / "x.jsonl").items) == ["a"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"text": "a"}\n3\n', "a number in row 1"),
        ('{"text": "a"}\n{"te', "Unterminated string"),
        ("[1, 2", "delimiter"),
        ('{"text": 1' + "0" * 5000 + "}", "digits"),
        (r'{"text": "\ud800"}', "surrogates"),
    ],
)
def test_json_that_holds_no_rows_is_refused_with_what_was_found(text, found, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UnreadableData, match=found):
        list(given(tmp_path / "x.json").items)


def test_a_list_too_long_to_be_parsed_as_a_whole_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "LARGEST_LIST", 3)
    (tmp_path / "x.json").write_text('["a"]')
    with pytest.raises(UnreadableData, match="one row per line"):
        given(tmp_path / "x.json")
