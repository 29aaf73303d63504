"""For MkDocs: the addresses of the repository and of the site, from pyproject.toml."""

import pathlib
import tomllib

FILE = pathlib.Path(__file__).parents[1] / "pyproject.toml"
PROJECT = tomllib.loads(FILE.read_text(encoding="utf-8"))
HOOK = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def on_config(config):
    """Called once MkDocs has read its configuration."""
    config.repo_url = HOOK["repository"]
    config.repo_name = HOOK["repository"].rpartition("/")[2]
    config.site_url = f"{HOOK['documentation']}/"
    return config


def on_page_markdown(markdown, **kwargs):
    """Called with the text of each page."""
    return markdown.replace("REPOSITORY", HOOK["repository"])
