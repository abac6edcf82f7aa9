"""Every recipe runs, small."""

import json

from crosslayer.train.run import Settings


def test_retrofit(tmp_path):
    import retrofit

    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; every unhappy family is unhappy in its own way. " * 60)
    small = Settings(data=str(text), steps=4, batch=2, context=16, layers=2, dim=32, heads=2)
    retrofit.run(str(tmp_path / "out"), ["prenorm", "mudd"], (0.0, 0.5), settings=small, device="cpu")
    rows = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert sorted(rows) == ["mudd 0.0 0.json", "mudd 0.5 0.json", "prenorm 0.0 0.json"]
    late = rows["mudd 0.5 0.json"]
    assert late["switch"] == 2 and abs(late["jump"]) < 1e-6 and len(late["curve"]) == 4
    # the same run until the switch
    assert late["curve"][:2] == rows["prenorm 0.0 0.json"]["curve"][:2]
    retrofit.report([str(tmp_path / "out")], str(tmp_path / "page.md"))
    assert "| `mudd` | 2 | " in (tmp_path / "page.md").read_text() and (tmp_path / "page1.svg").exists()
