"""Every link of the built documentation leads to a file and an anchor that exist; links to the web are well-formed.

python tools/check_site.py build/docs
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTRIBUTES = {"a": "href", "img": "src", "script": "src", "link": "href"}


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if link := given.get(ATTRIBUTES.get(tag, "")):
            self.links.append(link)


@cache
def read(path: Path) -> Page:
    return Page(path)


def trouble(page: Path, link: str) -> str:
    """What is wrong with a link; nothing where it is right."""
    parts = urlsplit(link)
    if parts.scheme in ("http", "https"):
        return "" if "." in parts.netloc and " " not in link else "not an address"
    if parts.scheme in ("mailto", "data"):
        return ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.exists():
        return "no such file"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
        return "no such anchor"
    return ""


def main(folder: Path) -> int:
    pages = sorted(folder.resolve().rglob("*.html"))
    wrong = [(page, link, why) for page in pages for link in read(page).links if (why := trouble(page, link))]
    for page, link, why in wrong:
        print(f"{page.relative_to(folder.resolve())}: {link}: {why}")
    print(f"{len(pages)} pages, {sum(len(read(page).links) for page in pages)} links, {len(wrong)} wrong")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
