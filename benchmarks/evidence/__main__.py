"""Takes over results, and writes the page, its figures and the rows of the connections."""

import sys
from pathlib import Path

from benchmarks.evidence.pages import write_pages
from benchmarks.evidence.studies import read_studies, take_over


def main(folders: list[str]) -> int:
    try:
        for folder in folders:
            print(take_over(Path(folder)))
        write_pages(read_studies())
    except (ValueError, OSError) as error:
        print(f"evidence: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
