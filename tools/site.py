"""mkdocs hooks for `make docs`: the README becomes the first page, and links outside docs/ become plain words.

A page links to code and examples beside docs/, which the site does not contain; on the site these links are shown as
their text. Links between pages stay, and mkdocs fails the build if one leads nowhere (strict).

A `<picture>` with a light and a dark drawing, which GitHub shows by the reader's theme, becomes two images:
mkdocs-material shows one of them, by the theme that is chosen on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'<picture>.*?srcset="(?P<dark>[^"]+)".*?<img\b[^>]*>\s*</picture>', re.DOTALL)
_ATTRIBUTE = re.compile(r'\b(src|alt)="([^"]*)"')


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace('="docs/', '="')
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/ by their text, and pictures by an image for each theme."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        words, path, _ = match.groups()
        in_docs = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, path))) is not None
        return match[0] if not path or "://" in path or in_docs else words

    def picture(match: re.Match[str]) -> str:
        image = dict(_ATTRIBUTE.findall(match[0][match[0].rindex("<img") :]))
        alt = " ".join(image["alt"].split())
        return f"![{alt}]({image['src']}#only-light)\n![{alt}]({match['dark']}#only-dark)"

    return _LINK.sub(link, _PICTURE.sub(picture, markdown))
