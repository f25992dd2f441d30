"""Links from the docs to files of the repository work on GitHub as they are; this makes them work on the site too.

Pages link to `../benchmarks/results/x.json`, `../../src/...` or `../CONTRIBUTING.md`. Every such file is added to the site
under `repository/`, Markdown as a page and anything else as it is, and the link is rewritten. Files that a linked Markdown
file links to come along. A link to a file that does not exist is left alone: MkDocs warns, and the strict build fails.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
DOCS, SITE = "docs/", "repository/"
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The path of a relative Markdown link or image: `](path` up to an anchor or the closing bracket."""


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of the repository that a page links to, and what those link to in turn."""
    to_read = [DOCS + file.src_uri for file in files.documentation_pages() if not file.inclusion.is_excluded()]
    seen = set(to_read)
    while to_read:
        page = to_read.pop()
        for target in _links(page, (ROOT / page).read_text(encoding="utf-8")).values():
            if target in seen or target.startswith(DOCS):
                continue
            seen.add(target)
            place, source = SITE + target, str(ROOT / target)
            files.append(File.generated(config, place, abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.endswith(".md"):
                to_read.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to where the files are on the site."""
    here = page.file.src_uri
    places = {
        link: posixpath.relpath(_on_site(target), posixpath.dirname(here) or ".")
        for link, target in _links(_in_repository(here), markdown).items()
    }
    return LINK.sub(lambda match: places.get(match[1], match[1]), markdown)


def _links(page: str, markdown: str) -> dict[str, str]:
    """Links of a page to files that exist, as they are written and as paths in the repository."""
    folder = posixpath.dirname(page)
    found = {link: posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(markdown)}
    return {link: path for link, path in found.items() if not path.startswith("..") and (ROOT / path).is_file()}


def _in_repository(place: str) -> str:
    return place.removeprefix(SITE) if place.startswith(SITE) else DOCS + place


def _on_site(path: str) -> str:
    return path.removeprefix(DOCS) if path.startswith(DOCS) else SITE + path
