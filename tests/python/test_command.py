"""The command `neaptide` itself."""

import subprocess
import sys
import types

import pytest
from neaptide_command import environment, neaptide

import neaptide.__main__ as command_line


def test_help_names_the_commands():
    done = neaptide("--help")
    assert done.returncode == 0
    assert "tokenize" in done.stdout and "report" in done.stdout and "--cmake-prefix-path" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "expected a command: tokenize, report"), (["tokenise"], "invalid choice: 'tokenise'"), (["-x"], "-x")],
)
def test_a_mistake_has_exit_code_2(arguments, text):
    done = neaptide(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


@pytest.mark.parametrize("module", ["tokenize", "report"])
def test_no_command_imports_the_extension(module):
    code = (
        f"import sys, neaptide.{module}; "
        "print([name for name in sys.modules if name == 'torch' or name.startswith('neaptide._C')])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("command", "package"), [("tokenize", "tokenizers"), ("report", "plotly")])
def test_a_missing_package_is_named_with_the_way_to_it(command, package):
    code = (
        f"import sys; sys.modules['{package}'] = None; import neaptide.__main__ as m; sys.exit(m.main(['{command}']))"
    )
    shell = [sys.executable, "-c", code, command]
    done = subprocess.run(shell, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"neaptide: error: neaptide {command} needs {package}, which is not there: pip install {package}\n"
    )


def test_the_cmake_prefix_is_that_of_the_installation(monkeypatch, capsys):
    def nowhere():
        raise FileNotFoundError("neaptide: expected the CMake package in lib; found none")

    paths = types.SimpleNamespace(cmake_prefix_path=lambda: "/opt/site-packages/neaptide")
    monkeypatch.setitem(sys.modules, "neaptide._paths", paths)
    assert command_line.main(["--cmake-prefix-path"]) == 0
    paths.cmake_prefix_path = nowhere
    assert command_line.main(["--cmake-prefix-path"]) == 2
    said = capsys.readouterr()
    assert said.out == "/opt/site-packages/neaptide\n"
    assert said.err == "neaptide: error: expected the CMake package in lib; found none\n"
