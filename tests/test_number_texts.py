"""Numbers and tables as texts."""

from crosslayer.number_texts import markdown_table


def test_a_bar_in_a_cell_of_a_table_is_no_column():
    table = markdown_table(["arm", "a|b"], [{"arm": "mudd | one way", "a|b": "1.5"}])
    assert table.splitlines() == [
        r"| arm | a\|b |",
        "| --- | ---: |",
        r"| mudd \| one way | 1.5 |",
    ]
