#!/usr/bin/env python3
"""Checks that every #include of the library obeys the layers, and a few other rules that a compiler does not see.

The add_layer() calls in the CMakeLists.txt under neap/ say what a folder may include (DEPS); this script compares every
#include of every file with them:

- a file of neap/X includes headers of X and of the layers in X's DEPS, directly listed, and of no other;
- a *_test.cpp or test_support.h may also include testing/ and what neap/sim offers without linking (control.h and
  loader.h);
- the layers form no cycle; neap/sim is included by no other layer, so that no feature depends on the simulator;
- a file that starts with `// torch-free` includes the standard library and torch-free files alone, and every file among
  TORCH_FREE_SOURCES or TORCH_FREE_TESTS reaches no torch header;
- nobody includes torch's umbrella headers and the library not all of ATen's operators (seconds per file), and no file
  outside a cuda/ folder includes a CUDA header;
- no file of more than 500 lines, no path of one particular machine, no mark of unfinished work.

Exit status 0 and one line when all is well; otherwise one line per fault, `file:line: what is wrong`, and status 1.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

KEYWORDS = {"DEPS", "SOURCES", "TORCH_FREE_SOURCES", "EXTERNAL", "TESTS", "TORCH_FREE_TESTS", "TEST_LINK", "CORE_ONLY"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
UMBRELLAS = {"torch/torch.h", "torch/all.h", "torch/extension.h", "torch/script.h"}
ALL_OPERATORS = {"ATen/ATen.h", "ATen/Functions.h"}  # fine in a test that calls dozens of them
CUDA = re.compile(r"^(cuda|cublas|cudnn|nccl|nvml|cub/|thrust/|c10/cuda/|ATen/cuda/)")
# What torch-free files may use besides the standard library: headers that know nothing of torch.
TORCH_FREE_EXTERNAL = re.compile(r"^(gtest/|gmock/|benchmark/|nlohmann/|spdlog/|sys/)")
STANDARD = re.compile(r"^[a-z0-9_]+(\.h)?$")  # <vector>, <cstdint>, and POSIX's <unistd.h>
TEST_FILES = ("_test.cpp", "test_support.h")
TEST_EXTRAS = {"neap/sim/control.h", "neap/sim/loader.h"}
MAX_LINES = 500
TEXT_SUFFIXES = {".h", ".cpp", ".cu", ".py", ".cmake", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".sh", ""}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:wo" r"rk|ro" r"ot|ho" r"me|opt/wheels)/")


@dataclass
class Layer:
    name: str
    place: str  # its CMakeLists.txt
    deps: list = field(default_factory=list)
    torch_free: list = field(default_factory=list)

    @property
    def folder(self):
        return self.place.rsplit("/", 1)[0]


def parse_layers(text, place):
    """The add_layer() calls of one CMakeLists.txt."""
    layers = []
    text = re.sub(r"#.*", "", text)
    for call in re.finditer(r"\badd_layer\s*\(([^)]*)\)", text):
        words = call.group(1).split()
        layer, keyword = Layer(words[0], place), None
        for word in words[1:]:
            if word in KEYWORDS:
                keyword = word
            elif keyword == "DEPS":
                layer.deps.append(word)
            elif keyword in ("TORCH_FREE_SOURCES", "TORCH_FREE_TESTS"):
                layer.torch_free.append(word)
        layers.append(layer)
    return layers


def find_cycle(layers):
    """A list of names that leads back to its start, or None."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in layers:
            return None
        for dep in layers[name].deps:
            cycle = visit(dep, [*path, name])
            if cycle:
                return cycle
        done.add(name)
        return None

    for name in layers:
        cycle = visit(name, [])
        if cycle:
            return cycle
    return None


def includes_of(text):
    """(line number, header) of every #include."""
    lines = enumerate(text.splitlines(), 1)
    return [(number, match.group(2)) for number, line in lines if (match := INCLUDE.match(line))]


class Checker:
    def __init__(self, root):
        self.root = root
        self.faults = []
        self.texts = {}
        self.layers = {}

    def fault(self, path, line, text):
        self.faults.append(f"{path}:{line}: {text}")

    def check(self):
        self.read_layers()
        self.read_sources()
        for path, text in sorted(self.texts.items()):
            is_torch_free = text.startswith("// torch-free")
            for number, header in includes_of(text):
                self.check_header(path, number, header)
                if path.startswith("neap/"):
                    self.check_layer(path, number, header)
                if is_torch_free:
                    self.check_torch_free(path, number, header)
        self.check_torch_free_targets()
        return self.faults

    def read_layers(self):
        for file in sorted(self.root.glob("neap/**/CMakeLists.txt")):
            for layer in parse_layers(file.read_text(), str(file.relative_to(self.root))):
                self.layers[layer.name] = layer
        for layer in self.layers.values():
            for dep in layer.deps:
                if dep not in self.layers:
                    self.fault(layer.place, 1, f"layer {layer.name} lists '{dep}' in DEPS, and there is no such layer")
                if dep == "sim" and not layer.folder.startswith("neap/sim"):
                    self.fault(layer.place, 1, f"layer {layer.name} depends on sim; no layer may know the simulator")
        cycle = find_cycle(self.layers)
        if cycle:
            self.fault(self.layers[cycle[0]].place, 1, f"layers form a cycle: {' -> '.join(cycle)}")

    def read_sources(self):
        for folder in ("neap", "testing", "cli", "tests", "benchmarks", "examples", "python"):
            for file in sorted((self.root / folder).rglob("*")):
                if file.suffix in (".h", ".cpp", ".cu") and file.is_file():
                    self.texts[str(file.relative_to(self.root))] = file.read_text()

    def check_header(self, path, number, header):
        is_library = path.startswith("neap/") and not path.endswith(TEST_FILES)
        if header in UMBRELLAS or (is_library and header in ALL_OPERATORS):
            self.fault(path, number, f"<{header}> costs seconds per file; include the narrow header of what is used")
        if CUDA.match(header) and "/cuda/" not in path:
            self.fault(path, number, f"<{header}> belongs in a cuda/ folder; the rest is device-agnostic")

    def check_layer(self, path, number, header):
        is_test = path.endswith(TEST_FILES)
        if header.startswith("testing/"):
            if not is_test:
                self.fault(path, number, f"{header} is for tests; the library must not include it")
            return
        if not header.startswith("neap/"):
            return
        if header.split("/")[1] == path.split("/")[1] or (is_test and header in TEST_EXTRAS):
            return
        own, other = self.layer_of(path), self.layer_of(header)
        if own is None:
            self.fault(path, number, f"its folder is no layer (no add_layer()) and may not include {header}")
        elif other is None:
            self.fault(path, number, f"{header} belongs to no layer (no add_layer() in its folder)")
        elif other.name not in own.deps:
            allowed = " ".join(own.deps) or "none"
            self.fault(path, number, f"layer {own.name} may not include {header} (its DEPS: {allowed})")

    def layer_of(self, path):
        """The layer of the innermost folder around a file that declares one."""
        around = [layer for layer in self.layers.values() if path.startswith(layer.folder + "/")]
        return max(around, key=lambda layer: len(layer.folder), default=None)

    def check_torch_free(self, path, number, header):
        if header in self.texts:
            if not self.texts[header].startswith("// torch-free"):
                self.fault(path, number, f"a torch-free file includes {header}, which is not marked torch-free")
        elif not (STANDARD.match(header) or TORCH_FREE_EXTERNAL.match(header)):
            self.fault(path, number, f"a torch-free file includes <{header}>")

    def check_torch_free_targets(self):
        """What CMake is told to be torch-free reaches no torch header, marked or not."""
        for layer in self.layers.values():
            for name in layer.torch_free:
                path = f"{layer.folder}/{name}"
                if path not in self.texts:
                    self.fault(layer.place, 1, f"{path} is listed and does not exist")
                    continue
                for chain in self.torch_chains(path):
                    self.fault(path, 1, f"listed as torch-free, but {' includes '.join(chain)}")

    def torch_chains(self, path):
        """Shortest include chains from `path` to torch headers (one per first torch header reached)."""
        seen, queue = {path}, [[path]]
        while queue:
            chain = queue.pop(0)
            for _, header in includes_of(self.texts.get(chain[-1], "")):
                if TORCH.match(header):
                    return [[*chain, header]]
                if header in self.texts and header not in seen:
                    seen.add(header)
                    queue.append([*chain, header])
        return []


def tracked_files(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:  # an unpacked archive without git
        return [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if p.is_file()]
    return [name for name in listed.stdout.split("\0") if name]


def check_text(path, text):
    """Faults of one file that have nothing to do with layers."""
    faults = []
    lines = text.splitlines()
    if path.endswith((".h", ".cpp", ".py")) and len(lines) > MAX_LINES:
        faults.append(f"{path}:{len(lines)}: more than {MAX_LINES} lines; split it by idea")
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            faults.append(f"{path}:{number}: a mark of unfinished work")
        if MACHINE_PATH.search(line):
            faults.append(f"{path}:{number}: a path of one particular machine")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root.resolve()

    checker = Checker(root)
    faults = checker.check()
    if not checker.layers:
        faults.append(f"{root}/neap: no add_layer() found; wrong folder?")
    files = [name for name in tracked_files(root) if Path(name).suffix in TEXT_SUFFIXES and (root / name).is_file()]
    for name in files:
        faults += check_text(name, (root / name).read_text(errors="replace"))
    for fault in faults:
        print(fault)
    counts = f"{len(checker.layers)} layers, {len(checker.texts)} sources, {len(files)} files"
    print(f"layers: {counts}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
