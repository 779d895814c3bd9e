"""A hook of mkdocs: the pages of the site are those of the repository, under the same paths.

So a link that works in the repository works on the site, also one from docs/ to examples/ or to a source file.
A folder in `nav` of mkdocs.yml stands for its pages, so that a new example needs no row there.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "tests/README.md")
LINK = re.compile(r"\]\(([^)\s#:]+)[^)\s:]*\)|<img[^>]* src=\"([^\":]+)\"")


def linked(pages: list[Path], root: Path) -> set[Path]:
    """The files that pages show or link to: pictures, sources. Not pages, not folders."""
    targets = set()
    for page in pages:
        for link, picture in LINK.findall(page.read_text()):
            path = (page.parent / (link or picture)).resolve()
            if path.is_file() and path.suffix != ".md" and path.is_relative_to(root):
                targets.add(path)
    return targets


def pages_in(folder: Path, index: Path) -> list[Path]:
    """The pages below `folder`: first those that `index` links to, in its order."""
    links = [(index.parent / link).resolve() for link, _ in LINK.findall(index.read_text())]
    pages = sorted(folder.rglob("*.md"))
    return sorted(pages, key=lambda page: links.index(page) if page in links else len(links))


def package_links(root: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder with a package `xds` made of links to the folders that the reference reads.

    A link to the whole root would contain itself (`.editable/`), and environments inside the root: mkdocstrings
    would read all of them.
    """
    folder = tempfile.TemporaryDirectory()
    package = Path(folder.name, "xds")
    package.mkdir()
    for entry in root.iterdir():
        if entry.name == "__init__.py" or (entry / "__init__.py").is_file():
            (package / entry.name).symlink_to(entry)
    return folder


def on_config(config: Any) -> None:
    """Write out the folders in `nav`, and say where the package is."""
    root = Path(config.config_file_path).resolve().parent
    config.package_links = package_links(root)  # removed with the config
    handlers = config.plugins["mkdocstrings"].config.handlers
    handlers["python"]["paths"] = [config.package_links.name]
    for entry in config.nav:
        for title, inside in entry.items() if isinstance(entry, dict) else ():
            if isinstance(inside, str) and inside.endswith("/"):
                own = root / inside / "README.md"
                index = own if own.exists() else root / "docs" / "README.md"
                found = [str(page.relative_to(root)) for page in pages_in(root / inside, index)]
                first = [{"All decisions": str(own.relative_to(root))}] if own.exists() else []
                entry[title] = first + [path for path in found if root / path != own]


def on_files(found: Files, config: Any) -> Files:
    """Replace what mkdocs has found in docs/."""
    root = Path(config.config_file_path).resolve().parent
    own = Path(config.docs_dir).resolve()
    kept = [file for file in found if not file.src_dir or Path(file.src_dir).resolve() != own]
    pages = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    styles = [root / each for each in config.extra_css if (root / each).is_file()]
    files = [*pages, *sorted(linked(pages, root)), *styles]
    names = [str(path.relative_to(root)) for path in files]
    added = [File(name, str(root), config.site_dir, config.use_directory_urls) for name in names]
    return Files([*kept, *added])
