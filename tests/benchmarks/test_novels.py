"""The novels of some studies from a collection in the layout of ELTeC."""

import json

import pytest

from benchmarks.evidence import novels
from crosslayer.files import short_digest

# Headings, page breaks, verse, references and notes, as the collection has them.
NOVEL = """<?xml version="1.0" encoding="UTF-8"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><title>Not the text</title></teiHeader>
<text type="T1FLU">
 <front><div type="titlepage"><p>Nor this</p></div></front>
 <body>
  <div type="group"><head>VOL. I.</head><pb/>
   <div type="chapter">
    <head> CHAPTER I. </head>
    <quote>
     <l>In such pursuits if <hi>wisdom</hi> lies,</l>
     <l>Who can thy taste despise?</l>
     <p><hi>Gay.</hi></p>
    </quote>
    <!-- checked -->
    <p>A shade of melancholy gathering on
     <pb n="4"/> his face.<ref target="#n1">[1]</ref> And <note>not this</note>so &amp; on</p>
    <p>Cowper’s verse—“<quote><l>Exults our rising soul,</l>
     <l>Disburdened of her load,</l></quote>”</p>
   </div>
  </div>
 </body>
 <back><div type="notes"><note>Nor this</note></div></back>
</text></TEI>
"""
TEXT = """VOL. I.

CHAPTER I.

In such pursuits if wisdom lies,
Who can thy taste despise?

Gay.

A shade of melancholy gathering on his face. And so & on

Cowper’s verse—“

Exults our rising soul,
Disburdened of her load,

”
"""


@pytest.fixture
def collection(tmp_path, monkeypatch):
    """A collection of two novels, of which the second has changed since its digest was written."""
    folder = tmp_path / "collection"
    (folder / novels.LEVEL).mkdir(parents=True)
    rows = ["id,file,digest", f"A,train.jsonl,{short_digest(TEXT)}", "B,valid.jsonl,0123"]
    for name in "AB":
        (folder / novels.LEVEL / f"{name}.xml").write_text(NOVEL, "utf8")
    monkeypatch.setattr(novels, "NOVELS", tmp_path / "novels.csv")
    novels.NOVELS.write_text("\n".join(rows) + "\n")
    return folder


def test_novels_are_written_and_changed_ones_are_named(collection, tmp_path, capsys):
    assert novels.main([str(collection), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["B"]
    for name, file in (("A", "train.jsonl"), ("B", "valid.jsonl")):
        (line,) = (tmp_path / "out" / file).read_text("utf8").splitlines()
        assert json.loads(line) == {"id": name, "text": TEXT}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file; expected a clone of"), ("<TEI>", "no element"), ("<TEI/>", "no body")],
)
def test_a_novel_that_cannot_be_read_is_named(collection, tmp_path, capsys, content, message):
    file = collection / novels.LEVEL / "B.xml"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert novels.main([str(collection), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
