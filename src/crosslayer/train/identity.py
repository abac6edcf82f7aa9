"""Whether two runs or comparisons are the same one: what differs between their descriptions."""

import json
from collections.abc import Collection
from typing import Any

# Options that only locate the data and the tokenizer: `DATA_DIGEST` identifies what they are.
PLACES_OF_DATA = frozenset({"data", "valid", "tokenizer"})


def first_difference(
    before: dict[str, Any], now: dict[str, Any], ignored: Collection[str] = ()
) -> str:
    """The first key, in their alphabetical order, with another value, in words; "" without any.

    Args:
        before: as it was read from JSON.
        now: may have tuples, which are lists in JSON.
        ignored: keys that may have any value.
    """
    now = json.loads(json.dumps(now))
    for key in sorted((before.keys() | now.keys()) - set(ignored)):
        if before.get(key) != now.get(key):
            return f"with {key} = {before.get(key)!r}; here it is {now.get(key)!r}"
    return ""
