"""Writes every table and figure of README, docs/ and benchmarks/ that comes from results or code.

python -m tools.update_docs

Not docs/families.md, and not docs/inspect-pictures.md, whose runs are not committed.
"""

from benchmarks.evidence.pages import write_pages
from benchmarks.evidence.studies import read_studies
from tools import update_benchmarks, update_pictures, update_results, update_retrofit


def main() -> None:
    write_pages(read_studies())
    update_results.main(update_results.RESULTS)
    update_pictures.main([])
    update_benchmarks.main()
    update_retrofit.main()


if __name__ == "__main__":
    main()
