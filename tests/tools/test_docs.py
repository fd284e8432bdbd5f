"""The documentation: links that lead somewhere, messages that exist, pages that a browser shows without complaint."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]\n]*\]\((?!https?://|mailto:|#)([^)\s#]+)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_links_of_every_page_lead_to_a_file():
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in tracked("*.md")
        for target in LINK.findall(FENCE.sub("", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert dead == []


def words_of(path):
    """The text of a source with its string literals joined, as a program that runs has them."""
    return re.sub(r'"\s*\n?\s*f?"', "", path.read_text()).replace('\\"', '"')


def test_every_message_of_troubleshooting_is_in_the_sources():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 20
    sources = "\n".join(words_of(path) for path in tracked("neap/*.cpp", "neap/*.h", "cli/*.cpp", "python/*.py"))
    for message in messages:
        # What varies is not in one piece with the rest; nor is a place that several messages share.
        for piece in re.split(r"…|\[(?:offload|recompute|parallel|sim)[.\w]*\]", message):
            words = piece.strip().strip("'\":;,")
            assert words in sources, f"{message!r}: no source has {words!r}"


def test_a_browser_shows_the_site_without_a_word_on_its_console(tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the browser: chromium is not installed (apt-get install chromium)")
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the site: mkdocs is not installed (make lint installs it)")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"""<(script|link|img)[^>]*(src|href)=["']?https?:""", page.read_text()), page
    for page in "index.html", "tour.html", "api.html", "source/neap/offload/engine.h.html":
        command = [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command += ["--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom"]
        shown = subprocess.run(
            [*command, f"file://{tmp_path / 'site' / page}"], capture_output=True, text=True, check=False, timeout=120
        )
        assert shown.returncode == 0, shown.stderr
        assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == [], page
        assert "<h1" in shown.stdout
