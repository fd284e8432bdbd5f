#!/usr/bin/env python3
"""Turns text files into one file of tokens for `neap train`, with the tokenizer of a Hugging Face model directory.

    tools/tokenize_text.py --model models/smollm2-135m --out data/notes.bin notes/ more.txt
    tools/tokenize_text.py --model models/smollm2-135m --out data/python.bin --python-stdlib

Each text is followed by one separator token. The output is llm.c's format: a header of 256 int32 that names the width
(16 bits where the vocabulary fits, else 32) and the number of tokens, so that `neap` recognises it and notices when it
is truncated; `--format nanogpt` leaves the header out. Files are taken in the order of their names: the same texts give
the same bytes.
"""

import argparse
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HEADER_WORDS = 256
LLMC = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}  # width → magic number and version
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
BATCH_BYTES = 1 << 22  # of text, encoded at a time


class TokenizeError(Exception):
    """What the reader of the message can mend."""


def python_sources():
    """Python's own standard library: a text that every machine with Python has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    return [path for path in sorted(library.rglob("*.py")) if not skipped & set(path.relative_to(library).parts)]


def files_below(paths):
    found = []
    for path in paths:
        if not path.exists():
            raise TokenizeError(f"expected a file or a folder; not found: {path}")
        found += [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    return found


def read_texts(files, max_bytes):
    """Texts in turn, at most max_bytes of them together. What is not UTF-8 is skipped with a note."""
    left = max_bytes
    for path in files:
        if left <= 0:
            return
        raw = path.read_bytes()[:left]
        try:
            text = raw.decode("utf-8", errors="ignore" if len(raw) == left else "strict")
        except UnicodeDecodeError:
            print(f"tokenize_text: skipped, not UTF-8: {path}", file=sys.stderr)
            continue
        if text:
            left -= len(raw)
            yield text


def batches(texts):
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def load_tokenizer(model):
    path = model / "tokenizer.json"
    if not path.exists():
        raise TokenizeError(f"expected a Hugging Face model directory with tokenizer.json; not found: {path}")
    return Tokenizer.from_file(str(path))


def separator_of(tokenizer, wanted):
    for token in [wanted] if wanted else SEPARATORS:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token_id
    raise TokenizeError(f"the tokenizer has no token {wanted or ', '.join(SEPARATORS)}; choose one with --separator")


def encode(tokenizer, separator, texts, dtype):
    pieces = []
    for batch in batches(texts):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            pieces += [np.array(encoding.ids, dtype=dtype), np.array([separator], dtype=dtype)]
    if not pieces:
        raise TokenizeError("expected some text; all files were empty")
    return np.concatenate(pieces)


def header(tokens):
    words = np.zeros(HEADER_WORDS, dtype="<i4")
    words[0:2] = LLMC[tokens.dtype.type]
    words[2] = tokens.size
    return words.tobytes()


def write_tokens(tokens, out, with_header):
    """Appears whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(header(tokens) if with_header else b"")
            file.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def tokenize(model, out, files, *, file_format="llmc", separator=None, max_bytes=sys.maxsize):
    """Writes `out` and returns the number of tokens in it."""
    if file_format == "llmc" and out.suffix != ".bin":
        raise TokenizeError(f"expected a name that ends in .bin, by which neap knows tokens from text; found: {out}")
    tokenizer = load_tokenizer(model)
    dtype = np.uint16 if tokenizer.get_vocab_size(with_added_tokens=True) <= 1 << 16 else np.uint32
    tokens = encode(tokenizer, separator_of(tokenizer, separator), read_texts(files, max_bytes), dtype)
    write_tokens(tokens, out, file_format == "llmc")
    return int(tokens.size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="text files, and folders whose files are all taken")
    parser.add_argument("--python-stdlib", action="store_true", help="take the sources of Python's standard library")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="file to write; a name that ends in .bin")
    parser.add_argument("--format", choices=("llmc", "nanogpt"), default="llmc")
    parser.add_argument(
        "--separator", help=f"token after each text; default: the first known of {' '.join(SEPARATORS)}"
    )
    parser.add_argument("--max-bytes", type=int, default=sys.maxsize, help="take no more text than this")
    arguments = parser.parse_args()
    try:
        files = files_below(arguments.paths) + (python_sources() if arguments.python_stdlib else [])
        if not files:
            raise TokenizeError("expected text files, folders, or --python-stdlib; found none")
        count = tokenize(
            arguments.model,
            arguments.out,
            files,
            file_format=arguments.format,
            separator=arguments.separator,
            max_bytes=arguments.max_bytes,
        )
    except TokenizeError as error:
        sys.exit(f"tokenize_text: {error}")
    print(f"{arguments.out}: {count} tokens")


if __name__ == "__main__":
    main()
