"""tools/check_layers.py finds each fault it promises to find, and this repository has none."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_layers.py"

GOOD = {
    "neap/base/CMakeLists.txt": "add_layer(base TORCH_FREE_SOURCES error.cpp TORCH_FREE_TESTS error_test.cpp)",
    "neap/base/error.h": "// torch-free\n#include <string>\n",
    "neap/base/error.cpp": '#include "neap/base/error.h"\n',
    "neap/base/error_test.cpp": '// torch-free\n#include <gtest/gtest.h>\n#include "neap/base/error.h"\n',
    "neap/device/CMakeLists.txt": "add_layer(device  # streams\n  DEPS base SOURCES stream.cpp TESTS stream_test.cpp)",
    "neap/device/stream.h": '#include <c10/core/Stream.h>\n#include "neap/base/error.h"\n',
    "neap/device/stream.cpp": '#include "neap/device/stream.h"\n',
    "neap/device/stream_test.cpp": '#include "neap/sim/control.h"\n#include "testing/sim_fixture.h"\n',
    "neap/offload/CMakeLists.txt": "add_layer(offload DEPS base device SOURCES engine.cpp)",
    "neap/offload/engine.cpp": '#include "neap/base/error.h"\n#include "neap/device/stream.h"\n',
    "neap/sim/CMakeLists.txt": "add_layer(sim CORE_ONLY DEPS base)",
    "neap/sim/control.h": '// torch-free\n#include "neap/base/error.h"\n',
}


def run(tmp_path, changes):
    files = {**GOOD, **changes}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, "--root", tmp_path], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_tree_that_obeys_passes(tmp_path):
    status, output = run(tmp_path, {})
    assert (status, output.splitlines()[-1]) == (0, f"layers: 4 layers, 8 sources, {len(GOOD)} files, 0 faults")


FAULTS = {
    "upward include": (
        {"neap/base/error.cpp": '\n#include "neap/device/stream.h"\n'},
        "neap/base/error.cpp:2: layer base may not include neap/device/stream.h (its DEPS: none)",
    ),
    "sideways include": (
        {"neap/device/stream.cpp": '#include "neap/offload/engine.h"\n'},
        "neap/device/stream.cpp:1: layer device may not include neap/offload/engine.h (its DEPS: base)",
    ),
    "a dependency of a dependency is no permission": (
        {"neap/offload/CMakeLists.txt": "add_layer(offload DEPS device SOURCES engine.cpp)"},
        "neap/offload/engine.cpp:1: layer offload may not include neap/base/error.h (its DEPS: device)",
    ),
    "cycle": (
        {"neap/base/CMakeLists.txt": "add_layer(base DEPS offload TORCH_FREE_SOURCES error.cpp)"},
        "layers form a cycle: base -> offload -> base",
    ),
    "unknown dependency": (
        {"neap/device/CMakeLists.txt": "add_layer(device DEPS base bass SOURCES stream.cpp)"},
        "layer device lists 'bass' in DEPS, and there is no such layer",
    ),
    "a feature that knows the simulator": (
        {"neap/offload/CMakeLists.txt": "add_layer(offload DEPS base device sim SOURCES engine.cpp)"},
        "layer offload depends on sim",
    ),
    "the library includes test helpers": (
        {"neap/offload/engine.cpp": '#include "testing/sim_fixture.h"\n'},
        "neap/offload/engine.cpp:1: testing/sim_fixture.h is for tests",
    ),
    "only control and loader of sim are open to tests": (
        {"neap/device/stream_test.cpp": '#include "neap/sim/engine/engine.h"\n'},
        "neap/device/stream_test.cpp:1: layer device may not include neap/sim/engine/engine.h",
    ),
    "a folder that is no layer": (
        {"neap/extra/a.cpp": '#include "neap/base/error.h"\n'},
        "neap/extra/a.cpp:1: its folder is no layer",
    ),
    "torch in a torch-free file": (
        {"neap/base/error.h": "// torch-free\n#include <ATen/core/Tensor.h>\n"},
        "neap/base/error.h:2: a torch-free file includes <ATen/core/Tensor.h>",
    ),
    "a torch-free file includes one that is not": (
        {"neap/offload/tape.h": '// torch-free\n#include "neap/device/stream.h"\n'},
        "neap/offload/tape.h:2: a torch-free file includes neap/device/stream.h, which is not marked torch-free",
    ),
    "an unmarked source listed as torch-free": (
        {"neap/base/error.cpp": "#include <c10/core/Device.h>\n"},
        "listed as torch-free, but neap/base/error.cpp includes c10/core/Device.h",
    ),
    "a source listed as torch-free reaches torch through a header": (
        {"neap/base/error.cpp": '#include "neap/base/x.h"\n', "neap/base/x.h": "#include <c10/core/Device.h>\n"},
        "listed as torch-free, but neap/base/error.cpp includes neap/base/x.h includes c10/core/Device.h",
    ),
    "a listed file that does not exist": (
        {"neap/base/CMakeLists.txt": "add_layer(base TORCH_FREE_SOURCES gone.cpp)"},
        "neap/base/gone.cpp is listed and does not exist",
    ),
    "torch's umbrella header": (
        {"neap/device/stream.cpp": "#include <torch/torch.h>\n"},
        "neap/device/stream.cpp:1: <torch/torch.h> costs seconds per file",
    ),
    "all operators in the library": (
        {"neap/device/stream.cpp": "#include <ATen/ATen.h>\n"},
        "neap/device/stream.cpp:1: <ATen/ATen.h> costs seconds per file",
    ),
    "a vendor's header outside its folder": (
        {"neap/device/stream.cpp": "#include <cuda_runtime.h>\n"},
        "neap/device/stream.cpp:1: <cuda_runtime.h> belongs in a cuda/ folder",
    ),
    "a file too long": ({"neap/device/long.h": "\n" * 501}, "neap/device/long.h:501: more than 500 lines"),
    "unfinished work": ({"neap/device/stream.cpp": "// TO" + "DO: later\n"}, "stream.cpp:1: a mark of unfinished work"),
    "a path of one machine": ({"README.md": "see /ro" + "ot/notes\n"}, "README.md:1: a path of one particular machine"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(tmp_path, name):
    changes, expected = FAULTS[name]
    status, output = run(tmp_path, changes)
    assert status == 1
    assert expected in output


def test_tests_may_include_all_operators(tmp_path):
    status, output = run(tmp_path, {"neap/device/stream_test.cpp": "#include <ATen/ATen.h>\n"})
    assert status == 0, output


def test_a_cuda_header_is_welcome_in_a_cuda_folder(tmp_path):
    status, output = run(tmp_path, {"neap/device/cuda/guard.cpp": "#include <cuda_runtime.h>\n"})
    assert status == 0, output


def test_an_empty_tree_is_an_error_not_a_success(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--root", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no add_layer() found" in done.stdout


def test_this_repository_obeys():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
