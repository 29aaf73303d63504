"""Project URLs and the README of a built package, from the address in pyproject.toml.

Hatchling runs this file when it builds. No other file contains the address.
"""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# `](target)` of a link or of a picture, where the target is a path in the repository.
LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


class PackagingHook(MetadataHookInterface):
    """Fills in those dynamic fields of pyproject.toml that depend on the address."""

    def update(self, metadata):
        repository = self.config["repository"]
        files = f"{repository}/blob/v{metadata['version']}"
        pictures = f"{repository}/raw/v{metadata['version']}"
        metadata["urls"] = {
            "Homepage": repository,
            "Documentation": self.config["documentation"],
            "Source": repository,
            "Changelog": f"{files}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
        readme = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(readme, files, pictures).replace("REPOSITORY", repository),
        }


def absolute(text, files, pictures):
    """Returns Markdown whose relative links begin with the address of files."""
    return LINK.sub(
        lambda link: f"]({pictures if link[1].endswith('.png') else files}/{link[1]})",
        text,
    )
