"""Which test proves what of which connection: found by collecting the tests, not written down."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import crosslayer

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "hf"))

# what is claimed, and the tests that may prove it, the best first
CLAIMS = {
    "laws": ["test_every_token_is_alone", "test_state_cuts_bitwise"],
    "golden numbers": ["test_golden.py"],
    "independent loop": ["test_loops.py"],
    "gradcheck": ["test_gradcheck"],
    "compile": ["test_one_graph"],
    "FSDP2": ["test_two_rank_fsdp2"],
    "checkpointing": ["test_gradient_checkpointing_is_bitwise"],
    "transformers": ["test_save_and_load"],
    "costs": ["test_as_a_real_model"],
}


# what people do with a model of a family, and the test that does it
DONE = {
    "same function": "test_starts_where_the_host_is",
    "host's checkpoint": "test_a_host_checkpoint_loads",
    "every cache": "test_with_every_cache",
    "samples, beams": "test_sampling_and_beams",
    "left padding": "test_left_padding_changes_nothing",
    "compiled step": "test_a_compiled_step_is_compiled_once",
    "saved, loaded": "test_save_and_load",
    "copied, pickled": "test_copies_and_pickles",
    "checkpointing": "test_gradient_checkpointing",
    "hidden states": "test_hidden_states_are_what_the_attentions_read",
    "attentions": "test_attention_weights",
    "LoRA": "test_peft",
}


@functools.cache
def collected() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", ""]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if "::" in line]


def proof(name: str, sources: list[str], tests: list[str]) -> str:
    """The first test of a source whose id names the connection."""
    word = re.compile(rf"(?<![a-z_]){name}(?![a-z])")
    for source in sources:
        for test in sorted(tests, key=lambda test: f"test_{name}" not in test):
            case = test.split("::", 1)[1]
            if source in test and word.search(case.replace("test_", "")):
                return f"`{case.split('[')[0]}`"
    return "–"


def table() -> str:
    tests = collected()
    lines = ["| connection | " + " | ".join(CLAIMS) + " |", "| --- |" + " --- |" * len(CLAIMS)]
    for name in crosslayer.available():
        lines.append(
            f"| `{name}` | " + " | ".join(proof(name, s, tests) for s in CLAIMS.values()) + " |"
        )
    return "\n".join(lines) + "\n"


def matrix() -> str:
    """How many arms each test tries on each family."""
    from tests.hf.backbones import FAMILIES

    lines = ["| family | " + " | ".join(DONE) + " |", "| --- |" + " ---: |" * len(DONE)]
    for family in FAMILIES:
        case = re.compile(rf"(?<![a-z0-9_]){family}(?![a-z0-9_])")
        counts = [
            sum(f"::{name}[" in test and bool(case.search(test)) for test in collected())
            for name in DONE.values()
        ]
        lines.append(
            f"| {family} | " + " | ".join(str(count) if count else "–" for count in counts) + " |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), matrix(), sep="\n")
