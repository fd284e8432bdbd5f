"""Where the parts of an installation are: the package is its prefix."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def cmake_prefix_path() -> str:
    """What CMAKE_PREFIX_PATH needs so that `find_package(neap)` finds the library inside this package."""
    if not (_PACKAGE / "lib" / "cmake" / "neap" / "neapConfig.cmake").exists():
        raise FileNotFoundError(
            f"neaptide: expected the CMake package in {_PACKAGE / 'lib'}; found none, as this is a build tree and no "
            "installation; install the package with `pip install . --no-build-isolation`"
        )
    return str(_PACKAGE)


def command() -> Path:
    """The `neap` command of this installation, or of the build tree that the package lies in."""
    for place in (_PACKAGE / "bin" / "neap", _PACKAGE.parent.parent / "cli" / "neap"):
        if place.exists():
            return place
    raise FileNotFoundError(f"neaptide: expected the neap command in {_PACKAGE / 'bin'}; found none; install again")
