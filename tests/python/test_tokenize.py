"""`neaptide tokenize`: the files it writes, and the errors it gives."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from neaptide_command import command, environment, neaptide
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from neaptide import tokenize

A_TEXT = Path(__file__)
SEPARATOR = 256


@pytest.fixture
def model(tmp_path):
    """A directory with a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run(*arguments):
    return neaptide("tokenize", *arguments)


def test_texts_become_tokens_with_a_separator_after_each(model, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("zwei")
    (tmp_path / "texts" / "a.txt").write_text("one")
    out = tmp_path / "out" / "x.bin"
    done = run("--model", model, "--out", out, tmp_path / "texts")
    assert done.returncode == 0, done.stderr
    assert "9 tokens" in done.stdout
    raw = out.read_bytes()
    assert list(np.frombuffer(raw[:12], dtype="<i4")) == [20240520, 1, 9]
    tokens = np.frombuffer(raw[1024:], dtype="<u2")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokens[:3].tolist()) == "one"
    assert tokens[3] == tokens[8] == SEPARATOR
    assert tokenizer.decode(tokens[4:8].tolist()) == "zwei"
    assert list(out.parent.iterdir()) == [out]


def test_nanogpt_format_has_no_header_and_max_bytes_cuts(model, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("ääää")
    out = tmp_path / "x.bin"
    done = run("--model", model, "--out", out, "--format", "nanogpt", "--max-bytes", 5, text)
    assert done.returncode == 0, done.stderr
    tokens = np.frombuffer(out.read_bytes(), dtype="<u2")
    assert len(tokens) == 5  # two letters of two bytes, half a letter dropped, the separator
    assert tokens[-1] == SEPARATOR


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    writer = tokenize.TokenWriter(tmp_path / "x.bin", tokenize.width_of(70001, "llmc"), with_header=True)
    writer.add([1])
    writer.add([70000])
    writer.finish()
    raw = (tmp_path / "x.bin").read_bytes()
    assert list(np.frombuffer(raw[:12], dtype="<i4")) == [20240801, 7, 2]
    assert list(np.frombuffer(raw[1024:], dtype="<u4")) == [1, 70000]
    assert tokenize.width_of(70001, "megatron") is np.int32


def parse_index(raw):
    """Version, type, lengths, pointers and documents, as Megatron-LM's reader takes them."""
    assert raw[:9] == b"MMIDIDX\0\0"
    version, code, sequences, entries = struct.unpack("<QBQQ", raw[9:34])
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", entries, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * entries
    return version, code, lengths.tolist(), pointers.tolist(), documents.tolist()


def test_lines_of_json_become_a_megatron_file_with_its_index(model, tmp_path, monkeypatch):
    lines = tmp_path / "web.jsonl"
    lines.write_text('{"body": "one"}\n\n{"body": "zwei", "id": 7}\n{"body": ""}\n{"body": "é"}')
    out = tmp_path / "x.bin"
    done = run("--model", model, "--out", out, "--format", "megatron", "--json-key", "body", lines)
    assert done.returncode == 0, done.stderr
    tokens = np.frombuffer(out.read_bytes(), dtype="<u2")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=True) == "onezweié"
    index = (tmp_path / "x.idx").read_bytes()
    assert parse_index(index) == (1, 8, [4, 5, 3], [0, 8, 18], [0, 1, 2, 3])

    monkeypatch.setattr(tokenize, "INDEX_ENTRIES", 2)  # in several parts
    tokenize.tokenize(model, out, [lines], file_format="megatron", json_key="body")
    assert (tmp_path / "x.idx").read_bytes() == index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "web.jsonl", "x.bin", "x.idx"]


def test_a_long_text_is_one_document_whose_pieces_end_with_lines(model, tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("äöü\n" * 10 + "end")
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 9)  # within a letter
    pieces = list(tokenize.read_documents([text], "text", sys.maxsize))
    assert len(pieces) > 5
    assert "".join(piece for piece, _ in pieces) == text.read_text()
    assert all(piece.endswith("\n") for piece, _ in pieces[:-1])
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenize.tokenize(model, tmp_path / "pieces.bin", [text])
    monkeypatch.undo()
    tokenize.tokenize(model, tmp_path / "whole.bin", [text])
    assert (tmp_path / "pieces.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def peak_kilobytes(*arguments):
    process = subprocess.Popen(command("tokenize", *arguments), env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss


def test_memory_does_not_grow_with_the_input(model, tmp_path):
    line = "All work and no play makes a dull boy. " * 5 + "\n"
    for name, megabytes in ("small.txt", 6), ("large.txt", 24):
        (tmp_path / name).write_text(line * (megabytes * 2**20 // len(line)))
    small = peak_kilobytes("--model", model, "--out", tmp_path / "s.bin", tmp_path / "small.txt")
    large = peak_kilobytes("--model", model, "--out", tmp_path / "l.bin", tmp_path / "large.txt")
    assert (tmp_path / "l.bin").stat().st_size > 40 * 2**20
    assert large < small + 20_000, (small, large)


def test_the_tokenizers_own_end_of_text_is_the_separator(model, tmp_path):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<eot>"])
    tokenizer.save(str(model / "tokenizer.json"))
    for written in '"<eot>"', '{"content": "<eot>", "lstrip": false}':
        (model / "tokenizer_config.json").write_text(f'{{"eos_token": {written}}}')
        (tmp_path / "a.txt").write_text("a")
        tokenize.tokenize(model, tmp_path / "x.bin", [tmp_path / "a.txt"])
        assert np.frombuffer((tmp_path / "x.bin").read_bytes()[1024:], dtype="<u2")[-1] == SEPARATOR + 1


@pytest.mark.parametrize("line", ["{", "[1]", '{"body": "no text"}', '{"text": 5}'])
def test_a_bad_line_of_json_is_named(model, tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    done = run("--model", model, "--out", tmp_path / "x.bin", tmp_path / "a.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith(f"neaptide: error: {tmp_path}/a.jsonl:2: expected")
    assert not (tmp_path / "x.bin").exists()


def test_pythons_own_sources_are_found_and_hold_no_packages():
    sources = tokenize.python_sources()
    names = [path.name for path in sources]
    assert "argparse.py" in names
    assert sources == sorted(sources)
    assert not any("site-packages" in path.parts for path in sources)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "x.bin", "nothing.txt"], "not found: nothing.txt"),
        (["--out", "x.bin"], "expected text files"),
        (["--out", "x.tokens", A_TEXT], "ends in .bin"),
        (["--out", "x.bin", "--separator", "<eof>", A_TEXT], "no token <eof>"),
        (["--out", "x.bin", "--max-bytes", 0, A_TEXT], "all files were empty"),
    ],
)
def test_mistakes_are_one_clear_line(model, arguments, text):
    done = run("--model", model, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("neaptide: error: ")
    assert text in done.stderr


def test_a_folder_without_tokenizer_is_named(tmp_path):
    done = run("--model", tmp_path, "--out", tmp_path / "x.bin", A_TEXT)
    assert done.returncode == 2
    assert f"{tmp_path}/tokenizer.json" in done.stderr
