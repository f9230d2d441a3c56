"""Links of a page to files outside docs/: to the repository where ``repo_url`` is set, else plain text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page's Markdown with these links; raises PluginError for a file that is not there."""
    root = Path(config.docs_dir).parent

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2].removeprefix("../"), found[3] or ""
        if not (root / target).exists():
            raise PluginError(f"{page.file.src_path} links to {found[2]}, which is not there")
        return f"[{text}]({config.repo_url}/blob/main/{target}{anchor})" if config.repo_url else text

    return LINK.sub(linked, markdown)
