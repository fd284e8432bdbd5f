"""Turns texts into a file of tokens for `neap train`, with the tokenizer of a Hugging Face model directory.

    neaptide tokenize --model models/smollm2-135m --out data/notes.bin notes/ more.txt
    neaptide tokenize --model models/smollm2-135m --out data/web.bin --format megatron web.jsonl
    neaptide tokenize --model models/smollm2-135m --out data/python.bin --python-stdlib

A document is a text file, or a line of a .jsonl file: an object whose key `text` (--json-key) holds the text. Each is
followed by one separator token, the tokenizer's own end-of-text token unless --separator names another.

    llmc       one file: a header of 256 int32 that names the width (16 bits where the vocabulary fits, else 32) and the
               number of tokens, so that `neap` recognises it and notices when it is truncated
    nanogpt    the same without the header
    megatron   the tokens, and beside them NAME.idx with the length of every document

Files are taken in the order of their names: the same texts give the same bytes. Memory does not grow with the input.
A text file is tokenised in pieces of 64 KiB, each up to the end of a line; a line of a .jsonl file whole.
"""

import argparse
import codecs
import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from neaptide._command import NAME, CommandError

__all__ = ["tokenize"]

HEADER_WORDS = 256
LLMC = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}  # type → magic number and version
LLMC_MOST = 2**31 - 1  # tokens that its header can count
MEGATRON = {np.uint16: 8, np.int32: 4}  # type → code
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
PIECE_BYTES = 1 << 16  # of one text file, tokenised at a time: small enough for several cores to share a batch
BATCH_CHARACTERS = 1 << 19  # of texts, handed to the tokenizer at a time
INDEX_ENTRIES = 1 << 16  # of the index, held in memory at a time


# ---- texts


def python_sources():
    """Python's own standard library: a text that every machine with Python has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    return [path for path in sorted(library.rglob("*.py")) if not skipped & set(path.relative_to(library).parts)]


def files_below(paths):
    found = []
    for path in paths:
        if not path.exists():
            raise CommandError(f"expected a file or a folder; not found: {path}")
        found += [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    return found


def blocks(path, most):
    """The first `most` bytes of a file."""
    with path.open("rb") as file:
        while most > 0 and (block := file.read(min(PIECE_BYTES, most))):
            most -= len(block)
            yield block


def is_utf8(path, most):
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in blocks(path, most):
            decoder.decode(block)
        decoder.decode(b"", final=path.stat().st_size <= most)
    except UnicodeDecodeError:
        return False
    return True


def pieces_of_text(path, most):
    """The text in pieces that end with a line, where there is one. What `most` leaves of a letter is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    for block in blocks(path, most):
        text = rest + decoder.decode(block)
        end = text.rfind("\n") + 1 or len(text)
        rest = text[end:] if len(block) == PIECE_BYTES else ""
        yield text[: len(text) - len(rest)]
    if rest:
        yield rest


def texts_of_lines(path, key, most):
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if most < len(line):
                return
            most -= len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise CommandError(f"{path}:{number}: expected a JSON object; {error}") from error
            text = value.get(key) if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise CommandError(f'{path}:{number}: expected an object with a text under "{key}" (see --json-key)')
            yield text


def read_documents(files, key, max_bytes):
    """(piece of text, whether a document ends with it) in turn, of at most max_bytes together."""
    left = max_bytes
    for path in files:
        if left <= 0:
            return
        if path.suffix == ".jsonl":
            yield from ((text, True) for text in texts_of_lines(path, key, left) if text)
        elif not is_utf8(path, left):
            print(f"{NAME}: skipped, not UTF-8: {path}", file=sys.stderr)
            continue
        else:
            last = None
            for piece in filter(None, pieces_of_text(path, left)):
                if last is not None:
                    yield last, False
                last = piece
            if last is not None:
                yield last, True
        left -= path.stat().st_size


def batches(documents):
    batch, size = [], 0
    for text, ends in documents:
        batch.append((text, ends))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---- tokens


class SlowTokenizer:
    """A tokenizer that transformers has in Python alone, behind the calls of a fast one."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def get_vocab_size(self):
        return len(self.tokenizer)

    def token_to_id(self, token):
        return self.tokenizer.get_vocab().get(token)

    def encode(self, texts):
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]


class FastTokenizer:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.get_vocab_size = tokenizer.get_vocab_size
        self.token_to_id = tokenizer.token_to_id

    def encode(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def load_tokenizer(model):
    path = model / "tokenizer.json"
    if path.exists():
        return FastTokenizer(Tokenizer.from_file(str(path)))
    if not (model / "tokenizer_config.json").exists():
        raise CommandError(f"expected a Hugging Face model directory with tokenizer.json; not found: {path}")
    transformers = importlib.import_module("transformers")  # takes seconds, and few need it
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # whatever the tokenizer of that name needs
        raise CommandError(f"transformers cannot load the tokenizer of {model}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return FastTokenizer(backend) if isinstance(backend, Tokenizer) else SlowTokenizer(tokenizer)


def own_separator(model):
    path = model / "tokenizer_config.json"
    token = json.loads(path.read_text()).get("eos_token") if path.exists() else None
    return token.get("content") if isinstance(token, dict) else token


def separator_of(tokenizer, model, wanted):
    own = own_separator(model)
    candidates = [wanted] if wanted else [*([own] if own else []), *SEPARATORS]
    for token in candidates:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token_id
    raise CommandError(f"the tokenizer has no token {', '.join(candidates)}; choose one with --separator")


def width_of(vocabulary, file_format):
    if vocabulary <= 1 << 16:
        return np.uint16
    return np.int32 if file_format == "megatron" else np.uint32


# ---- files


def little_endian(values, dtype):
    return np.asarray(values, dtype=dtype).astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()


class NewFile:
    """Written beside its place; appears whole under its name, or not at all."""

    def __init__(self, path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self.file = self.temporary.open("w+b")

    def commit(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.replace(self.path)

    def close(self):
        self.file.close()
        self.temporary.unlink(missing_ok=True)


class TokenWriter:
    """Documents' tokens, piece by piece, into a .bin file."""

    def __init__(self, out, dtype, with_header):
        self.dtype = dtype
        self.with_header = with_header
        self.bin = NewFile(out)
        self.tokens = 0
        if with_header:
            self.bin.file.write(bytes(4 * HEADER_WORDS))

    def add(self, ids):
        self.bin.file.write(little_endian(ids, self.dtype))
        self.tokens += len(ids)

    def end_document(self):
        pass

    def finish(self):
        if self.with_header:
            if self.tokens > LLMC_MOST:
                raise CommandError(
                    f"llm.c's header counts to {LLMC_MOST} tokens; these are {self.tokens}: choose another --format"
                )
            self.bin.file.seek(0)
            self.bin.file.write(little_endian([*LLMC[self.dtype], self.tokens], np.int32))
        self.bin.commit()

    def close(self):
        self.bin.close()


class MegatronWriter(TokenWriter):
    """The same with an index: its lengths are written as they come, and its other arrays follow from them."""

    def __init__(self, out, dtype):
        super().__init__(out, dtype, with_header=False)
        self.idx = NewFile(out.with_suffix(".idx"))
        self.header = MEGATRON_MAGIC + little_endian([1], np.uint64) + bytes([MEGATRON[dtype]])
        self.idx.file.write(self.header + bytes(16))
        self.documents = 0
        self.begin = 0  # of the current document, in tokens

    def end_document(self):
        self.idx.file.write(little_endian([self.tokens - self.begin], np.int32))
        self.begin = self.tokens
        self.documents += 1

    def finish(self):
        lengths = len(self.header) + 16
        next_byte = 0
        for first in range(0, self.documents, INDEX_ENTRIES):
            count = min(INDEX_ENTRIES, self.documents - first)
            self.idx.file.seek(lengths + 4 * first)
            ends = np.cumsum(np.frombuffer(self.idx.file.read(4 * count), dtype="<i4"), dtype=np.int64)
            pointers = next_byte + np.dtype(self.dtype).itemsize * np.concatenate([[0], ends[:-1]])
            next_byte += int(np.dtype(self.dtype).itemsize * ends[-1])
            self.idx.file.seek(0, os.SEEK_END)
            self.idx.file.write(little_endian(pointers, np.int64))
        for first in range(0, self.documents + 1, INDEX_ENTRIES):
            entries = np.arange(first, min(first + INDEX_ENTRIES, self.documents + 1))
            self.idx.file.write(little_endian(entries, np.int64))
        self.idx.file.seek(len(self.header))
        self.idx.file.write(little_endian([self.documents, self.documents + 1], np.uint64))
        super().finish()
        self.idx.commit()

    def close(self):
        super().close()
        self.idx.close()


def write(writer, tokenizer, separator, documents):
    for batch in batches(documents):
        ids_of_batch = tokenizer.encode([text for text, _ in batch])
        for ids, (_, ends) in zip(ids_of_batch, batch, strict=True):
            writer.add(ids)
            if ends:
                writer.add([separator])
                writer.end_document()
    if writer.tokens == 0:
        raise CommandError("expected some text; all files were empty")
    writer.finish()


def tokenize(
    model: Path,
    out: Path,
    files: Iterable[Path],
    *,
    file_format: str = "llmc",
    separator: str | None = None,
    json_key: str = "text",
    max_bytes: int = sys.maxsize,
) -> int:
    """Writes the tokens of some files, one document after another, and returns how many they are.

    Args:
        model: Hugging Face directory with the tokenizer.
        out: path of the file to write, which ends in .bin; it appears whole or not at all.
        files: paths of text and .jsonl files, in order.
        file_format: "llmc", "nanogpt" or "megatron", which writes an .idx beside it.
        separator: token after each document; None: the tokenizer's end-of-text token.
        json_key: where a line of a .jsonl file has its text.
        max_bytes: take no more input than this.

    Raises:
        CommandError: one of these is not as it should be, or there is no text; nothing was written.
    """
    if file_format != "nanogpt" and out.suffix != ".bin":
        raise CommandError(f"expected a name that ends in .bin, by which neap knows tokens from text; found: {out}")
    tokenizer = load_tokenizer(model)
    separator = separator_of(tokenizer, model, separator)
    dtype = width_of(tokenizer.get_vocab_size(), file_format)
    writer = MegatronWriter(out, dtype) if file_format == "megatron" else TokenWriter(out, dtype, file_format == "llmc")
    try:
        write(writer, tokenizer, separator, read_documents(files, json_key, max_bytes))
    finally:
        writer.close()
    return writer.tokens


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog=f"{NAME} tokenize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="text and .jsonl files, and folders whose files are all taken"
    )
    parser.add_argument("--python-stdlib", action="store_true", help="take the sources of Python's standard library")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory with a tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="file to write; a name that ends in .bin")
    parser.add_argument("--format", choices=("llmc", "nanogpt", "megatron"), default="llmc")
    parser.add_argument(
        "--separator",
        help=f"token after each document; default: the tokenizer's eos_token, or the first of {' '.join(SEPARATORS)}",
    )
    parser.add_argument("--json-key", default="text", help="where a line of a .jsonl file has its text")
    parser.add_argument("--max-bytes", type=int, default=sys.maxsize, help="take no more input than this")
    return parser.parse_args(arguments)


def main(arguments=None):
    """`neaptide tokenize`."""
    options = parse(arguments)
    files = files_below(options.paths) + (python_sources() if options.python_stdlib else [])
    if not files:
        raise CommandError("expected text files, folders, or --python-stdlib; found none")
    count = tokenize(
        options.model,
        options.out,
        files,
        file_format=options.format,
        separator=options.separator,
        json_key=options.json_key,
        max_bytes=options.max_bytes,
    )
    print(f"{options.out}: {count} tokens")
