"""Takes over comparisons and inspections; writes the pages, figures and rows of the connections."""

import sys
from pathlib import Path

from benchmarks.evidence.pages import write_pages
from benchmarks.evidence.pruning import take_over_pruning
from benchmarks.evidence.studies import read_studies, take_over
from crosslayer.errors import error_in_one_line
from crosslayer.inspect.report import JSON_FILE


def main(folders: list[str]) -> int:
    try:
        for folder in map(Path, folders):
            print(take_over_pruning(folder) if (folder / JSON_FILE).exists() else take_over(folder))
        write_pages(read_studies())
    except (ValueError, OSError) as error:
        print(f"evidence: {error_in_one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
