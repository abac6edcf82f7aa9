"""Nine tasks and three more, as lm-evaluation-harness has them, over JSON lines in a folder of one's own.

A row of `TASKS` is a task of the harness written for other field names: the same contexts, continuations, metrics and
few-shot format, spaces included (its COPA scores "…because" + "  it rained", with two). Tests hold every row to the
harness's own task. The folder holds for each task one file, `NAME.jsonl` or `NAME.jsonl.gz`, a document a line.

Where it differs from the harness: that draws few-shot examples from a training or validation split, and here there is
one file a task. They are drawn from it, never the document under test, by the same sampler from a fixed seed; so
few-shot numbers are close to the harness's and not of the same draw. `commonsense_qa_cloze` scores the answers
themselves and is not one of the harness's.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

Doc = dict[str, Any]


class Task(NamedTuple):
    harness: str | None  # its name there
    file: str
    fields: str
    metrics: tuple[str, ...]
    text: str | Callable[[Doc], str]
    target: str | Callable[[Doc], str] = "label"
    choices: str | list[str] | Callable[[Doc], list[str]] | None = "choices"

    @property
    def config(self) -> dict[str, Any]:
        """The harness's own configuration of it, but for where the documents are."""
        how = {
            "perplexity": {"aggregation": "perplexity", "higher_is_better": False},
            "acc": {"aggregation": "mean", "higher_is_better": True},
            "acc_norm": {"aggregation": "mean", "higher_is_better": True},
        }
        return {
            "output_type": "multiple_choice" if self.choices else "loglikelihood",
            "doc_to_text": self.text,
            "doc_to_target": self.target,
            "doc_to_choice": self.choices,
            "metric_list": [{"metric": metric, **how[metric]} for metric in self.metrics],
            "test_split": "test",
            # the same split, so that the sampler leaves out the document under test
            "fewshot_split": "test",
        }


def activity(doc: Doc) -> str:
    """HellaSwag's context; the unfinished sentence at its end is the one that begins with a small letter."""
    return re.sub(r'(?<=[.?!"] )[a-z][^.?!]*$', lambda m: m[0].capitalize(), doc["context"])


def premise(doc: Doc) -> str:
    return (
        doc["context"].strip()[:-1] + {"cause": " because", "effect": " therefore"}[doc["relation"]]
    )


def small(doc: Doc) -> list[str]:
    return [" " + choice[0].lower() + choice[1:] for choice in doc["choices"]]


def remainder(doc: Doc) -> str:
    """What followed WSC's pronoun, with its space where it was a word."""
    return doc["continuation"] if doc["continuation"][0] in ".,;:!?" else " " + doc["continuation"]


def lettered(doc: Doc) -> str:
    answers = "".join(
        f"\n{letter}. {choice}" for letter, choice in zip("ABCDE", doc["choices"], strict=True)
    )
    return f"Question: {doc['context'].strip()}{answers}\nAnswer:"


QUESTION = "Question: {{context}}\nAnswer:"
PASSAGE = "{{passage}}\nQuestion: {{question}}?\nAnswer:"
CHOICE, PARTIAL = "context choices label", "contexts continuation label"
ACC, BOTH = ("acc",), ("acc", "acc_norm")
TASKS = {
    "lambada": Task("lambada_openai", "lambada_openai_test", "context target", ("perplexity", "acc"),
                    "{{context}}", "{{' ' + target}}", None),
    "hellaswag": Task("hellaswag", "hellaswag_val", CHOICE, BOTH, activity),
    "piqa": Task("piqa", "piqa_val", CHOICE, BOTH, QUESTION),
    "winogrande": Task("winogrande", "winogrande_xl_val", PARTIAL, ACC, "label", "continuation", "contexts"),
    "arc_easy": Task("arc_easy", "arc_easy_test", CHOICE, BOTH, QUESTION),
    "arc_challenge": Task("arc_challenge", "arc_challenge_test", CHOICE, BOTH, QUESTION),
    "boolq": Task("boolq", "boolq_val", "passage question label", ACC, PASSAGE, choices=["no", "yes"]),
    "openbookqa": Task("openbookqa", "openbookqa_test", CHOICE, BOTH, "context"),
    "copa": Task("copa", "copa_val", "context relation choices label", ACC, premise, choices=small),
    "commonsense_qa": Task("commonsense_qa", "commonsenseqa_dev", CHOICE, ACC, lettered, choices=list("ABCDE")),
    "commonsense_qa_cloze": Task(None, "commonsenseqa_dev", CHOICE, BOTH, QUESTION),
    "wsc273": Task("wsc273", "wsc273_test", PARTIAL, ACC, "label", remainder, "contexts"),
}  # fmt: skip
NINE = list(TASKS)[:9]
