"""The package's description: README.md with links and pictures that work away from the repository.

hatchling runs this whenever it builds, also from an sdist. Relative links become addresses below `project.urls.Repository`,
at the tag of the version that is built; pictures become addresses of the bytes themselves.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)")
"""A Markdown link or picture whose address is relative to the repository."""


def absolute(readme: str, repository: str, tag: str) -> str:
    """The text with every relative link as an address that works anywhere."""

    def address(match: re.Match[str]) -> str:
        view = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{view}/{tag}/{match['path']})"

    return LINK.sub(address, readme)


class CustomMetadataHook(MetadataHookInterface):
    """What hatchling looks for by this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        readme = (root / "README.md").read_text(encoding="utf-8")
        text = absolute(readme, project["urls"]["Repository"], f"v{project['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
