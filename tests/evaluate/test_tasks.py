"""Every row of the table against the harness's own task, on the same documents in their original schema."""

import functools
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from crosslayer.evaluate.records import find, records
from crosslayer.evaluate.tasks import NINE, TASKS
from tests.evaluate.lms import DATA, needs_data

LETTERS = "ABCDE"


def lettered(row):
    return {"text": row["choices"], "label": list(LETTERS[: len(row["choices"])])}


def hellaswag(row):
    label, rest = row["context"].split(": ", 1)
    head, _, tail = rest.rpartition(" ")
    # the unfinished sentence is ctx_b; the test below has documents as the original file spells them
    while head and not (head[-1] in '.?!"' and tail[0].islower()):
        head, _, word = head.rpartition(" ")
        tail = f"{word} {tail}"
    a, b = (head, tail) if head and rest[-1] not in ".?!" else (rest, "")
    return {
        "activity_label": label,
        "ctx_a": a,
        "ctx_b": b,
        "endings": row["choices"],
        "label": str(row["label"]),
    }


def cut(row):
    """What two contexts share, to the last word, and what each has after it."""
    one, two = row["contexts"]
    same = next(i for i, (a, b) in enumerate(zip(one + "\0", two + "\1", strict=False)) if a != b)
    shared = one[: one.rfind(" ", 0, same) + 1]
    return shared, one[len(shared) :], two[len(shared) :]


def winogrande(row):
    shared, one, two = cut(row)
    sentence = f"{shared}_ {row['continuation']}"
    return {"sentence": sentence, "option1": one, "option2": two, "answer": str(row["label"] + 1)}


def wsc273(row):
    shared, one, two = cut(row)
    space = "" if row["continuation"][0] in ".,;:!?" else " "
    return {
        "text": f"{shared}it{space}{row['continuation']}", "pronoun": "it", "pronoun_loc": len(shared),
        "options": [one, two], "label": row["label"],
    }  # fmt: skip


ORIGINAL = {
    "lambada": lambda r: {"text": f"{r['context']} {r['target']}"},
    "hellaswag": hellaswag,
    "piqa": lambda r: {
        "goal": r["context"], "sol1": r["choices"][0], "sol2": r["choices"][1], "label": r["label"]
    },
    "winogrande": winogrande,
    "arc_easy": lambda r: {"question": r["context"], "choices": lettered(r), "answerKey": LETTERS[r["label"]]},
    "boolq": lambda r: {k: r[k] for k in ("passage", "question", "label")},
    "openbookqa": lambda r: {"question_stem": r["context"], "choices": lettered(r), "answerKey": LETTERS[r["label"]]},
    "copa": lambda r: {
        "premise": r["context"], "choice1": r["choices"][0], "choice2": r["choices"][1], "question": r["relation"],
        "label": r["label"],
    },
    "wsc273": wsc273,
}  # fmt: skip
ORIGINAL["arc_challenge"] = ORIGINAL["commonsense_qa"] = ORIGINAL["arc_easy"]

# documents as the original files spell them, and as a folder of ours has them
SPELT = {
    "hellaswag": [
        (
            {"activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he",
             "endings": ["is using wrap to wrap a pair of skis.", "[substeps] rips  tiles off."], "label": "1"},
            {"context": "Roof shingle removal: A man is sitting on a roof. he",
             "choices": ["is using wrap to wrap a pair of skis.", " rips tiles off."], "label": 1},
        ),
        (
            {"activity_label": "Home and Garden",
             "ctx_a": "[header] How to sow [title] Choose a pot. [step] Pots drain, e.g. clay ones.", "ctx_b": "",
             "endings": ["Water it.", "Eat it."], "label": "0"},
            {"context": "Home and Garden: How to sow. Choose a pot. Pots drain, e.g. clay ones.",
             "choices": ["Water it.", "Eat it."], "label": 0},
        ),
    ],
    "copa": [
        (
            {"premise": "The Man turned on the faucet. ", "choice1": "It rained.", "choice2": "Water flowed.",
             "question": "effect", "label": 1},
            {"context": "The Man turned on the faucet. ", "choices": ["It rained.", "Water flowed."],
             "relation": "effect", "label": 1},
        ),
    ],
    "winogrande": [
        (
            {"sentence": "Sarah beat Maria so _ always got the cases.", "option1": "Sarah", "option2": "Maria",
             "answer": "2"},
            {"contexts": ["Sarah beat Maria so Sarah", "Sarah beat Maria so Maria"],
             "continuation": "always got the cases.", "label": 1},
        ),
    ],
    "wsc273": [
        (
            {"text": "The fish ate the worm. It was  hungry.", "pronoun": "It", "pronoun_loc": 23,
             "options": ["The fish", "The worm"], "label": 0},
            {"contexts": ["The fish ate the worm. The fish", "The fish ate the worm. The worm"],
             "continuation": "was hungry.", "label": 0},
        ),
        (
            {"text": "Bob saw the plant, so he watered it.", "pronoun": "it", "pronoun_loc": 33,
             "options": ["The plant", "Bob"], "label": 0},
            {"contexts": ["Bob saw the plant, so he watered the plant", "Bob saw the plant, so he watered Bob"],
             "continuation": ".", "label": 0},
        ),
    ],
    "lambada": [({"text": "“Is it?” he  said\n\nto one"}, {"context": "“Is it?” he  said\n\nto", "target": "one"})],
}  # fmt: skip


@functools.cache
def harness_tasks():
    """The harness's own index, of the folders these tasks are in."""
    root = Path(lm_eval.tasks.__file__).parent
    folders = [
        "lambada",
        "hellaswag",
        "piqa",
        "winogrande",
        "arc",
        "super_glue",
        "openbookqa",
        "commonsense_qa",
        "wsc273",
    ]
    return TaskManager(
        include_defaults=False, include_path=[root / folder for folder in folders]
    ).task_index


def harness_config(name: str) -> dict:
    return dict(load_yaml(harness_tasks()[TASKS[name].harness].yaml_path, resolve_func=True))


def requests(config: dict, rows, shots: int):
    """What is scored, in order. The examples are of one split, so that the harness's sampler draws the same."""
    config = {
        k: v for k, v in config.items() if k not in ("tag", "group", "dataset_path", "dataset_name")
    }
    config |= {
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
    }
    task = ConfigurableTask(
        config=config | {"custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)}}
    )
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    return task, [(r.doc_id, r.idx, r.request_type, r.args) for r in task.instances]


def assert_alike(name: str, original, ours, shots: int):
    theirs, expected = requests(harness_config(name), original, shots)
    own, found = requests({"task": name} | TASKS[name].config, ours, shots)
    assert found == expected
    assert own.higher_is_better() == theirs.higher_is_better()
    assert {k: v.__name__ for k, v in own.aggregation().items()} == {
        k: v.__name__ for k, v in theirs.aggregation().items()
    }
    lengths = (
        [len(choices) for choices in (own.doc_to_choice(doc) for doc in ours)]
        if TASKS[name].choices
        else [1]
    )
    answers = [(-float(3 * i % 4), False) for i in range(max(lengths))]
    for mine, other in zip(own.eval_docs, theirs.eval_docs, strict=True):
        n = len(own.doc_to_choice(mine)) if TASKS[name].choices else 1
        assert own.process_results(mine, answers[:n]) == theirs.process_results(other, answers[:n])
        assert (
            [len(c) for c in own.doc_to_choice(mine)]
            == [len(c) for c in theirs.doc_to_choice(other)]
            if n > 1
            else True
        )


@needs_data
@pytest.mark.parametrize("shots", [0, 5])
@pytest.mark.parametrize("name", ORIGINAL)
def test_requests_are_the_harness_own(name, shots):
    rows = [
        row for _, row in records(find(Path(DATA) / "eval", TASKS[name].file, TASKS[name].fields))
    ]
    rows = rows[:60] + rows[-60:]
    assert_alike(name, [ORIGINAL[name](row) for row in rows], rows, shots)


@pytest.mark.parametrize("name", SPELT)
def test_documents_as_the_original_files_spell_them(name):
    original, ours = zip(*SPELT[name], strict=True)
    ours = [dict(row) for row in ours]
    if name == "hellaswag":  # a row holds what the harness's preprocessing made of the endings
        ours[0]["choices"][1] = "rips tiles off."
        original[0]["endings"][1] = "[substeps]rips  tiles off."
    assert_alike(name, list(original), ours, 0)


def test_every_task_of_the_harness_is_compared():
    assert {name for name, task in TASKS.items() if task.harness} == set(ORIGINAL)
    assert (
        " ".join(NINE)
        == "lambada hellaswag piqa winogrande arc_easy arc_challenge boolq openbookqa copa"
    )


@needs_data
@pytest.mark.parametrize("name", TASKS)
def test_files_have_their_fields_and_gold_labels_in_range(name):
    task = TASKS[name]
    count = 0
    for _, row in records(find(Path(DATA) / "eval", task.file, task.fields)):
        count += 1
        if task.choices is None:
            assert row["target"] and " " not in row["target"]
        else:
            choices = row["contexts"] if "contexts" in row else row.get("choices", ["no", "yes"])
            assert row["label"] in range(len(choices)) and all(choices)
            assert task.choices != list(LETTERS) or len(choices) == 5
    assert count >= 100


@needs_data
def test_hellaswag_finds_every_unfinished_sentence():
    rows = [row for _, row in records(find(Path(DATA) / "eval", "hellaswag_val", "context"))]
    changed = [row for row in rows if TASKS["hellaswag"].text(row) != row["context"]]
    # the 3,243 documents from ActivityNet come first; four of them go on with a digit
    assert len(changed) == 3239 and all(row["id"] < 3243 for row in changed)
