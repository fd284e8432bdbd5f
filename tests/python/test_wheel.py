"""The package as people get it: a wheel, installed where nothing of this tree is."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from build_tree import BUILD, ROOT


def compiled_with():
    """What the tests were compiled with, so that a compiler cache knows the objects."""
    cache = (BUILD / "CMakeCache.txt").read_text()
    found = dict(re.findall(r"^(\w+):\w+=(.*)$", cache, re.MULTILINE))
    return {name: found[name] for name in ("CMAKE_CXX_COMPILER", "CMAKE_CXX_FLAGS")}


TRAIN = """
import torch, neaptide as nt, neaptide.sim
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(3)]
model = torch.nn.Sequential(*layers).to("sim")
x = torch.randn(64, 64, device="sim")
model(x).sum().backward()
expected = [p.grad.cpu() for p in model.parameters()]
model.zero_grad()
handle = nt.offload(model, min_bytes=0, keep_last=0)
model(x).sum().backward()
assert all(torch.equal(p.grad.cpu(), e) for p, e in zip(model.parameters(), expected))
assert handle.take_step_report().offloaded_bytes > 0
print(nt.__version__, nt.__file__)
"""


def call(*command, **environment):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)


def succeed(*command):
    done = call(*command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with the wheel in it, and the torch of this one."""
    # Kept for the next time. Beside the build and as deep: seen from there the sources have the same names, and so a
    # compiler cache has the objects.
    wheels = tmp_path_factory.mktemp("wheels")
    settings = [
        f"--config-settings=build-dir={BUILD.with_name(BUILD.name + '-wheel')}",
        "--config-settings=cmake.build-type=None",
    ]
    settings += [f"--config-settings=cmake.define.{name}={value}" for name, value in compiled_with().items()]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    succeed(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), *settings, str(ROOT))
    (wheel,) = wheels.glob("neaptide-*.whl")

    folder = tmp_path_factory.mktemp("environment")
    succeed(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    succeed(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder, site


def test_it_trains_where_nothing_of_this_tree_is(environment):
    folder, site = environment
    version, place = succeed(str(folder / "bin" / "python"), "-c", TRAIN).split()
    assert place == str(site / "neaptide" / "__init__.py")
    assert f"VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


def test_it_has_the_command(environment, tmp_path):
    folder, _ = environment
    neap = folder / "bin" / "neap"
    assert "0." in succeed(str(neap), "--version")
    done = call(str(neap), "train", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("neap: error: ")


def test_it_has_the_headers_and_the_cmake_package(environment, tmp_path):
    folder, site = environment
    print_path = "import neaptide._paths as p; print(p.cmake_prefix_path())"
    prefix = succeed(str(folder / "bin" / "python"), "-c", print_path).strip()
    assert prefix == str(site / "neaptide")
    torch_folder = Path(torch.__file__).parent
    succeed(
        *("cmake", "-G", "Ninja", "-S", str(ROOT / "tests" / "install" / "consumer"), "-B", str(tmp_path)),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DNEAP_TORCH_DIR={torch_folder}"),
    )
    assert (site / "neaptide" / "include" / "neap" / "offload" / "engine.h").exists()


def test_it_is_typed_and_says_for_which_python_and_torch(environment):
    _, site = environment
    for name in ("py.typed", "_C.pyi"):
        assert (site / "neaptide" / name).exists()
    (metadata,) = site.glob("neaptide-*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    assert "Requires-Python: >=3.10" in lines
    assert any(line.startswith("Requires-Dist: torch") for line in lines)


def test_another_torch_is_refused_by_name(environment):
    folder, site = environment
    recorded = site / "neaptide" / "_built_with.py"
    text = recorded.read_text()
    assert f'TORCH = "{torch.__version__}"' in text
    recorded.write_text(text.replace(torch.__version__, "2.99.1"))
    try:
        done = call(str(folder / "bin" / "python"), "-c", "import neaptide")
    finally:
        recorded.write_text(text)
    assert done.returncode == 1
    assert "expected torch 2.99.1, which it was built with" in done.stderr
    assert f"found torch {torch.__version__}" in done.stderr
