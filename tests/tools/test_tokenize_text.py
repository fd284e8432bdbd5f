"""tools/tokenize_text.py: the files it writes, and the errors it gives."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "tokenize_text.py"
SEPARATOR = 256

spec = importlib.util.spec_from_file_location("tokenize_text", SCRIPT)
tokenize_text = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tokenize_text)


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
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], check=False, capture_output=True, text=True
    )


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


def test_a_large_vocabulary_takes_four_bytes(model, tmp_path):
    tokens = np.array([1, 70000], dtype=np.uint32)
    tokenize_text.write_tokens(tokens, tmp_path / "x.bin", with_header=True)
    raw = (tmp_path / "x.bin").read_bytes()
    assert list(np.frombuffer(raw[:12], dtype="<i4")) == [20240801, 7, 2]
    assert list(np.frombuffer(raw[1024:], dtype="<u4")) == [1, 70000]


def test_pythons_own_sources_are_found_and_hold_no_packages():
    sources = tokenize_text.python_sources()
    names = [path.name for path in sources]
    assert "argparse.py" in names
    assert sources == sorted(sources)
    assert not any("site-packages" in path.parts for path in sources)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "x.bin", "nothing.txt"], "not found: nothing.txt"),
        (["--out", "x.bin"], "expected text files"),
        (["--out", "x.tokens", SCRIPT], "ends in .bin"),
        (["--out", "x.bin", "--separator", "<eof>", SCRIPT], "no token <eof>"),
        (["--out", "x.bin", "--max-bytes", 0, SCRIPT], "all files were empty"),
    ],
)
def test_mistakes_are_one_clear_line(model, arguments, text):
    done = run("--model", model, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("tokenize_text: ")
    assert text in done.stderr


def test_a_folder_without_tokenizer_is_named(tmp_path):
    done = run("--model", tmp_path, "--out", tmp_path / "x.bin", SCRIPT)
    assert done.returncode == 1
    assert f"{tmp_path}/tokenizer.json" in done.stderr
