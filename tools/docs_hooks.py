"""What mkdocs does for this repository beyond its own (mkdocs.yml): links to sources, and the page of the Python API.

Pages link to files of the repository as they lie there, so that the links work where the files are read. In the site
each such file becomes a page of its own under source/: Markdown as it is, all else as a listing. A link to a file that
does not exist is an error, wherever it stands.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*(?:`[^`]*`)?[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".py": "python", ".yaml": "yaml", ".toml": "toml", ".txt": "text"}
SHIM = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
API_MARK = "<!-- modules of the package -->"


def is_outside(target):
    return target.startswith(("http://", "https://", "mailto:", "#"))


def repository_path(page, target):
    """(path in the repository, anchor) of what a page of the repository links to."""
    target, _, anchor = target.partition("#")
    return os.path.normpath(PurePosixPath(page).parent / target), anchor


def site_path(path):
    """Where a file of the repository is in the site's sources."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def links_of(text):
    return [match for match in LINK.finditer(FENCE.sub("", text)) if not is_outside(match["target"])]


def checked(page, target):
    path, anchor = repository_path(page, target)
    if not (ROOT / path).exists():
        raise PluginError(f"{page}: the link to {target} leads nowhere: there is no {path}")
    return path, anchor


def rewritten(page, text):
    """The text with its links as the site has them. Folders stay words: there is nothing to show of them."""

    def replace(match):
        if is_outside(match["target"]):
            return match[0]
        path, anchor = checked(page, match["target"])
        if (ROOT / path).is_dir():
            return match["text"]
        here = PurePosixPath(site_path(page)).parent
        relative = os.path.relpath(site_path(path), here)
        return f"[{match['text']}]({relative}{'#' + anchor if anchor else ''})"

    parts, at = [], 0
    for fence in FENCE.finditer(text):  # code is left alone
        parts += [LINK.sub(replace, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(replace, text[at:])])


def page_of_source(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        without_contents = "" if "\n## " in text else "---\nhide: [toc]\n---\n"
        return without_contents + rewritten(path, text)
    fence = "`" * 8
    head = f"---\nhide: [toc]\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    return f"{head}{fence}{LANGUAGES.get(Path(path).suffix, '')}\n{text}\n{fence}\n"


def sections(entries):
    """(name, its entries) of every section of the navigation, from the outside in."""
    for entry in entries:
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, list):
                yield name, value
                yield from sections(value)


def on_config(config):
    """Gives pages that the navigation does not name a place in it: decisions with decisions, others in the guide."""
    by_name = dict(sections(config["nav"]))
    named = {page for entries in by_name.values() for entry in entries for page in places_of(entry)}
    for path in sorted((ROOT / DOCS).rglob("*.md")):
        page = path.relative_to(ROOT / DOCS).as_posix()
        if page not in named:
            by_name["Decisions" if page.startswith("decisions/") else "Guide"].append(page)
    return config


def places_of(entry):
    return [entry] if isinstance(entry, str) else [value for value in entry.values() if isinstance(value, str)]


def on_files(files, config):
    """Adds a page for every file outside docs/ that a page links to, and for what those link to in turn."""
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()]
    waiting += [path for path in config["extra"]["source_pages"] if (ROOT / path).exists()]
    seen = set()
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        if not page.startswith(DOCS):
            files.append(File.generated(config, site_path(page), content=page_of_source(page)))
        if page.endswith(".md"):
            for link in links_of((ROOT / page).read_text(encoding="utf-8")):
                path, _ = checked(page, link["target"])
                if (ROOT / path).is_file() and not path.startswith(DOCS):
                    waiting.append(path)
    return files


def public_modules():
    """Modules of the Python package that are meant to be imported, the package itself first."""
    package = ROOT / "python" / "neaptide"
    found = [entry for entry in sorted(package.iterdir()) if not entry.name.startswith(("_", "."))]
    names = ["neaptide"]
    for entry in found:
        if entry.suffix == ".py":
            names.append(f"neaptide.{entry.stem}")
        elif (entry / "__init__.py").exists():
            names.append(f"neaptide.{entry.name}")
    names += [f"neaptide.integrations.{file.stem}" for file in sorted(package.glob("integrations/[!_]*.py"))]
    return names


def on_page_markdown(markdown, page, config, files):
    del config, files
    if page.file.src_uri.startswith("source/"):
        return markdown
    modules = "\n\n".join(f"## `{name}`\n\n::: {name}" for name in public_modules())
    return rewritten(DOCS + page.file.src_uri, markdown).replace(API_MARK, modules)


def on_post_page(output, page, config):
    """Leaves out what the theme would fetch from elsewhere, a search that works from the disk; the pages do without."""
    del page, config
    return output.replace(SHIM, "")


def on_post_template(output, template_name, config):
    del template_name, config
    return output.replace(SHIM, "")
