"""The reports' HTML: a page that stands alone, in light and dark colours, and its tables."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --faint: #595959; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e6e6e6; --faint: #a0a0a0; --line: #3a3d42; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 60rem; } .note { color: var(--faint); font-size: .9rem; }
.scroll { overflow-x: auto; margin-bottom: 1.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; min-width: 4rem; text-align: left; vertical-align: top;
         border-bottom: 1px solid var(--line); }
.numbers :is(th, td):not(:first-child) { text-align: right; } .numbers td { white-space: nowrap; }
.charts { display: grid; gap: 0 1rem; margin-bottom: 1.2rem;
          grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; background: #fff; border-radius: 6px; padding: .4rem; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; display: block; }
@media (max-width: 40rem) { figure.wide svg { max-width: none; width: 60rem; } }
"""


def render_page(title: str, setup: str, body: str) -> str:
    """A page in one file: its title, a paragraph of text, and HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(setup)}</p>
{body}
</body></html>
"""


def render_table(columns: Iterable[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table of texts, which scrolls where the page is narrower.

    Args:
        columns: their titles.
        rows: the texts of each.
        style: a class of `_STYLE`, like "numbers".
    """
    head = "".join(f"<th>{escape(title)}</th>" for title in columns)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in row)
        body += f"<tr>{cells}</tr>"
    table = f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>\n'


def render_notes(notes: Iterable[str]) -> str:
    """A small paragraph each."""
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)
