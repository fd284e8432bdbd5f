"""Other libraries' activation offload on the simulated device, from their own sources.

The sources come from PyPI, into build/peers; each library's one module is loaded by itself, since their
packages need much that has no part in this. What has to be different for a device that is no CUDA is written at each
adapter, and nothing else is changed. load_*() need `torch.sim` and return None where the sources cannot be had.
"""

import contextlib
import functools
import importlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent.parent / "build" / "peers"
TORCHTUNE = "torchtune==0.6.1"
TRL = "trl==1.16.0"
VEOMNI = "veomni==0.1.12"
DEEPSPEED = "deepspeed==0.19.8"


def fetch(requirement):
    """The unpacked archive of a release, without what it requires; None when it cannot be had."""
    place = FOLDER / requirement
    if not place.exists():
        archives = FOLDER / "archives"
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-build-isolation"]
        done = subprocess.run([*pip, "--dest", archives, requirement], stdout=sys.stderr, check=False)
        name, version = requirement.split("==")
        found = sorted(archives.glob(f"{name}-{version}*"))
        if done.returncode != 0 or not found:
            return None
        shutil.unpack_archive(found[0], place, "zip" if found[0].suffix == ".whl" else "gztar")
    roots = list(place.glob(requirement.replace("==", "-")))  # a source archive has a folder around everything
    return roots[0] if roots else place


@contextlib.contextmanager
def stubs(**modules):
    """Stands in for packages while the block imports something; afterwards they are unknown again."""
    before = dict(sys.modules)
    for name, attributes in modules.items():
        dotted = name.replace("__", ".")
        module = sys.modules[dotted] = types.ModuleType(dotted)
        module.__path__ = []
        vars(module).update(attributes)
    try:
        yield
    finally:
        roots = {name.partition("__")[0] for name in modules}
        for name in list(sys.modules):
            if name.partition(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name not in sys.modules})


def load_file(name, path, changes=()):
    """A module made of one file; of `changes` each pair replaces a text that must be in it."""
    text = path.read_text()
    for old, new in changes:
        if old not in text:
            raise RuntimeError(f"{path.name}: expected {old!r} in it; found another version of the file")
        text = text.replace(old, new)
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look it up
    exec(compile(text, path, "exec"), vars(module))
    return module


@functools.cache
def load_torchtune():
    """Stubs for torchao and for the rest of torchtune; "cuda" in the text becomes "sim"."""
    root = fetch(TORCHTUNE)
    if root is None:
        return None
    memory = types.SimpleNamespace(percent=0.0)
    with stubs(
        psutil={"virtual_memory": lambda: memory},
        torchao={"__version__": "0.9.0"},
        torchao__dtypes={},
        torchao__dtypes__nf4tensor={"NF4Tensor": type("NF4Tensor", (), {})},
        torchtune={},
        torchtune__modules={"TiedLinear": type("TiedLinear", (), {})},
        torchtune__utils={"get_logger": lambda level=None: None},
    ):
        source = root / "torchtune" / "training" / "_activation_offloading.py"
        return load_file("torchtune_on_sim", source, [("torch.cuda.", "torch.sim."), ('"cuda"', '"sim"')])


@functools.cache
def load_trl():
    """Nothing is different: it asks torch.accelerator."""
    root = fetch(TRL)
    return None if root is None else load_file("trl_on_sim", root / "trl" / "models" / "activation_offloading.py")


@functools.cache
def load_veomni():
    """The packages' own __init__ files are left out, and its module for devices is told that there is one, "sim"."""
    root = fetch(VEOMNI)
    if root is None:
        return None
    paths = {name: {"__path__": [str(root / name.replace("__", "/"))]} for name in ("veomni", "veomni__utils")}
    paths["veomni__distributed"] = {"__path__": [str(root / "veomni" / "distributed")]}
    os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")
    with stubs(**paths):
        device = importlib.import_module("veomni.utils.device")
        device.IS_CUDA_AVAILABLE = True
        device.get_device_type = lambda: "sim"
        return importlib.import_module("veomni.distributed.async_offload")


@functools.cache
def load_deepspeed():
    """Its accelerator is a stub over torch.sim."""
    root = fetch(DEEPSPEED)
    if root is None:
        return None
    accelerator = types.SimpleNamespace(
        Stream=torch.sim.Stream,
        stream=torch.sim.stream,
        current_stream=torch.sim.current_stream,
        is_synchronized_device=lambda: False,
        on_accelerator=lambda tensor: tensor.device.type == "sim",
        pin_memory=lambda tensor, make_copy=True: (
            tensor.pin_memory() if make_copy else torch.empty_like(tensor, pin_memory=True)
        ),
    )
    with stubs(deepspeed={}, deepspeed__accelerator={"get_accelerator": lambda: accelerator}):
        folder = root / "deepspeed" / "runtime" / "activation_checkpointing"
        return load_file("deepspeed_on_sim", folder / "offload_activations.py")
