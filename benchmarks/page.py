"""Render all of ``benchmarks/results`` as one page, ``benchmarks/results.html``, which needs no
network.

    python benchmarks/page.py
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from string import Template

import markdown  # type: ignore[import-untyped]

HERE = Path(__file__).parent
PAGE = HERE / "results.html"
SKELETON = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TorchRelay: benchmark results</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
section { border-top: 1px solid #8888; margin-top: 2rem; }
p, li { overflow-wrap: anywhere; }
table { display: block; overflow-x: auto; border-collapse: collapse; max-width: 100%; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #8884; }
img { max-width: 100%; }
pre { overflow-x: auto; font-size: .8rem; line-height: 1.2; }
</style>
</head>
<body>
<h1>Benchmark results</h1>
<p>Each section is one file of <code>benchmarks/results</code>, with its command, machine and
versions. The machines are noisy: compare ratios within a table.</p>
<nav><ul>
$links
</ul></nav>
$sections
</body>
</html>
""")


def with_images(body: str, folder: Path) -> str:
    """Put the bytes of PNG images, whose paths are relative to ``folder``, into the page."""

    def embedded(found: re.Match[str]) -> str:
        data = base64.b64encode((folder / found[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    return re.sub(r'src="([^"]+)"', embedded, body)


def page(files: list[Path]) -> str:
    """The page of some results files."""
    links, sections = [], []
    for file in files:
        text = re.sub(r"^#", "##", file.read_text(), flags=re.MULTILINE)
        title = text.splitlines()[0].lstrip("# ")
        links.append(f'<li><a href="#{file.stem}">{title}</a></li>')
        rendered = markdown.markdown(text, extensions=["tables", "fenced_code"])
        body = with_images(rendered, file.parent)
        sections.append(f'<section id="{file.stem}">\n{body}\n</section>')
    return SKELETON.substitute(links="\n".join(links), sections="\n".join(sections))


def main() -> None:
    PAGE.write_text(page(sorted((HERE / "results").glob("*.md"))))
    print(PAGE)


if __name__ == "__main__":
    main()
