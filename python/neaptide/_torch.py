"""Which torch is here, without importing it, which takes seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def installed_torch() -> str | None:
    """Its full version, as in `torch.__version__`; None if there is no torch."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        version = Path(folder) / "version.py"
        if version.exists() and (found := re.search(r"^__version__ = '([^']+)'", version.read_text(), re.MULTILINE)):
            return found[1]
    return None


def check_torch(version: str, built_with: str) -> None:
    """Raises ImportError when it is not the torch that this version of Neaptide was built with."""
    found = installed_torch()
    if found != built_with:
        here = f"torch {found}, whose C++ interface is another" if found else "no torch"
        raise ImportError(
            f"neaptide {version}: expected torch {built_with}, which it was built with; found {here}; build "
            "neaptide again with the torch that is installed "
            "(pip install --force-reinstall --no-build-isolation), or install that torch"
        )
