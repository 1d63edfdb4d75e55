"""What `mkdocs build` does to pages that are written for the repository: README.md becomes the
first page.

The site has no files but the pages and their pictures. A link to another file of the repository
becomes plain text; of one that leads nowhere mkdocs warns, which `--strict` makes an error.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def for_the_site(text: str, folder: Path, page_folder: Path) -> str:
    """Return a page's text, whose links begin in `folder`, as it stands in `page_folder` of the
    site."""

    def link(match: re.Match) -> str:
        target = (folder / match["path"]).resolve()
        if not target.exists():
            return match[0]
        if not target.is_relative_to(DOCS):
            return match["text"]
        return f"[{match['text']}]({os.path.relpath(target, page_folder)}{match['anchor'] or ''})"

    return LINK.sub(link, text)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    readme = for_the_site((ROOT / "README.md").read_text(), ROOT, DOCS)
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = (DOCS / page.file.src_uri).parent
    return for_the_site(markdown, folder, folder)
