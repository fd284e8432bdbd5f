"""tools/setup.py: which torch it takes, and what it says when a person has to act."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("neap_setup", ROOT / "tools" / "setup.py")
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


def python_with_torch(folder, version):
    """An interpreter that finds a torch of that version, made of what setup.py looks at."""
    package = folder / "site" / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "include").mkdir()
    (package / "lib" / "libtorch_cpu.so").touch()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.13.0a0+gitabc", "3.0.1"])
def test_an_installed_torch_is_used_where_it_lies_without_importing_it(tmp_path, monkeypatch, version):
    python = python_with_torch(tmp_path, version)
    monkeypatch.setenv("NEAP_PYTHON", str(python))
    assert setup.choose_torch() == (python, str(tmp_path / "site"))


def test_a_torch_too_old_is_refused_by_name_and_version(tmp_path, monkeypatch):
    python = python_with_torch(tmp_path, "2.10.1")
    monkeypatch.setenv("NEAP_PYTHON", str(python))
    with pytest.raises(setup.SetupError, match=r"python has torch 2\.10\.1; set it to one with torch 2\.11 or newer"):
        setup.choose_torch()


def test_a_python_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NEAP_PYTHON", str(tmp_path / "python"))
    with pytest.raises(setup.SetupError, match="has no torch"):
        setup.choose_torch()


def test_without_a_torch_one_is_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.delenv("NEAP_PYTHON", raising=False)
    monkeypatch.setattr(setup, "torch_of", lambda python: None)
    python, folder = setup.choose_torch()
    assert folder is None
    assert python.exists()


def test_somebody_who_is_not_root_is_told_the_one_command(monkeypatch):
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup, "missing_packages", lambda packages: ["ninja-build", "libfmt-dev"])
    monkeypatch.setattr(setup.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(setup.subprocess, "run", lambda *args, **kwargs: pytest.fail("must not run anything"))
    with pytest.raises(
        setup.SetupError, match="sudo apt-get install --yes --no-install-recommends ninja-build libfmt-dev"
    ):
        setup.ensure_packages({"build"})


def test_root_installs_what_is_missing_and_nothing_else(monkeypatch):
    commands = []
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup, "missing_packages", lambda packages: ["ninja-build"])
    monkeypatch.setattr(setup.os, "geteuid", lambda: 0)
    done = setup.subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(setup.subprocess, "run", lambda command, **kwargs: commands.append(command) or done)
    setup.ensure_packages({"build"})
    assert [command[:2] for command in commands] == [["apt-get", "update"], ["apt-get", "install"]]
    assert "ninja-build" in commands[1]


def test_lint_asks_for_more_than_building():
    building, linting = setup.wanted_packages({"build"}), setup.wanted_packages({"build", "lint"})
    assert "ninja-build" in building
    assert "clang-tidy" not in building
    assert set(linting) - set(building) == {"clang", "clang-format", "clang-tidy"}


def test_what_builds_the_documentation_is_installed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    for name in "STAMP", "LINT_STAMP", "DOCS_REQUIREMENTS":
        monkeypatch.setattr(setup, name, tmp_path / name)
    (tmp_path / "STAMP").write_text("an environment")
    (tmp_path / "DOCS_REQUIREMENTS").write_text("mkdocs==1")
    asked = []
    monkeypatch.setattr(setup, "pip", lambda *arguments: asked.append(arguments))
    setup.ensure_documentation()
    setup.ensure_documentation()
    assert asked == [("--requirement", tmp_path / "DOCS_REQUIREMENTS")]
    (tmp_path / "DOCS_REQUIREMENTS").write_text("mkdocs==2")
    setup.ensure_documentation()
    (tmp_path / "STAMP").write_text("another environment")
    setup.ensure_documentation()
    assert len(asked) == 3
