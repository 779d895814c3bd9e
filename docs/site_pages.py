"""A hook of mkdocs: the pages of the site are those of the repository, under the same paths.

So a link that works in the repository works on the site, also one from docs/ to examples/ or to a source file.
"""

from __future__ import annotations

import re
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


def on_files(files: Files, config: Any) -> Files:
    """Replace what mkdocs has found in docs/."""
    root = Path(config.config_file_path).resolve().parent
    own = Path(config.docs_dir).resolve()
    kept = [file for file in files if not file.src_dir or Path(file.src_dir).resolve() != own]
    pages = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    names = [str(path.relative_to(root)) for path in [*pages, *sorted(linked(pages, root))]]
    added = [File(name, str(root), config.site_dir, config.use_directory_urls) for name in names]
    return Files([*kept, *added])
