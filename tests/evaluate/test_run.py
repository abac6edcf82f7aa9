"""Tasks on tiny models: numbers by hand, batches, dtypes, saving and loading, going on after a stop."""

import gzip
import json
import math

import pytest
import torch
from lm_eval.api.model import LM

import crosslayer
from crosslayer.evaluate import TASKS, evaluate
from crosslayer.evaluate.harness import run
from tests.evaluate.lms import (
    DATA,
    byte_tokenizer,
    log_probabilities,
    needs_data,
    neox_tokenizer,
    shake,
    small_folder,
    small_rows,
    tiny,
    write_lines,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("data") / "eval")


def metrics(results: dict) -> dict:
    return {
        (row["task"], row.get("shots"), name): metric["value"]
        for row in results["results"]
        for name, metric in row["metrics"].items()
    }


def measure(model, data, tasks=("lambada", "piqa", "winogrande"), **options) -> dict:
    return metrics(evaluate(model, tasks, data=data, **{"tokenizer": byte_tokenizer(), **options}))


def by_hand(model, encode, pairs):
    """Log-likelihoods of continuations and whether each would be decoded greedily."""
    found = []
    for context, continuation in pairs:
        seen, whole = encode(context), encode(context + continuation)
        with torch.no_grad():
            greedy = model(torch.tensor([whole])).logits[0, len(seen) - 1 : -1].argmax(-1).tolist()
        found.append(
            (
                log_probabilities(model, whole)[len(seen) - 1 :].sum().item(),
                greedy == whole[len(seen) :],
            )
        )
    return found


def test_every_task_runs(data):
    results = evaluate(tiny(512), list(TASKS), [0, 5], data=data, tokenizer=byte_tokenizer())
    assert [(row["task"], row["shots"]) for row in results["results"]] == [
        (t, n) for t in TASKS for n in (0, 5)
    ]
    for row in results["results"]:
        assert row["n"] == 9 and tuple(row["metrics"]) == TASKS[row["task"]].metrics
        for name, metric in row["metrics"].items():
            assert metric["stderr"] >= 0 and (name == "perplexity" or 0 <= metric["value"] <= 1)


@needs_data
def test_every_task_runs_on_the_real_files():
    model = crosslayer.connect(tiny(128, 50304), "mudd")
    results = evaluate(
        model, list(TASKS), [0, 5], limit=8, batch_size=4, tokenizer=neox_tokenizer()
    )
    assert len(results["results"]) == 24 and all(row["n"] == 8 for row in results["results"])
    cut = {(row["task"], row["shots"]): row["truncated"] for row in results["results"]}
    assert cut["boolq", 5] == 8 and cut["copa", 5] == 0, "what did not fit is said"
    assert {name: results["settings"][name] for name in ("arm", "dtype", "context", "limit", "seed")} == {
        "arm": "mudd", "dtype": "float32", "context": 128, "limit": 8, "seed": 1234
    }  # fmt: skip
    assert {"crosslayer", "lm_eval", "torch", "transformers"} <= results["environment"].keys()


def test_numbers_by_hand(data):
    model, encode = tiny(128), byte_tokenizer().encode
    found = measure(model, data)

    rows = small_rows(TASKS["lambada"].fields)
    scores = by_hand(model, encode, [(r["context"], " " + r["target"]) for r in rows])
    assert found["lambada", 0, "perplexity"] == pytest.approx(
        math.exp(-sum(s for s, _ in scores) / len(rows)), rel=1e-5
    )
    assert found["lambada", 0, "acc"] == sum(greedy for _, greedy in scores) / len(rows)

    right = normed = 0
    for row in small_rows(TASKS["piqa"].fields):
        question = f"Question: {row['context']}\nAnswer:"
        scores = [
            s
            for s, _ in by_hand(
                model, encode, [(question, " " + choice) for choice in row["choices"]]
            )
        ]
        lengths = [len(choice) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["label"]
        normed += max(range(len(scores)), key=lambda i: scores[i] / lengths[i]) == row["label"]
    assert found["piqa", 0, "acc"] == right / 9 and found["piqa", 0, "acc_norm"] == normed / 9

    right = 0
    for row in small_rows(TASKS["winogrande"].fields):
        scores = [
            s
            for s, _ in by_hand(
                model, encode, [(c, " " + row["continuation"]) for c in row["contexts"]]
            )
        ]
        right += scores.index(max(scores)) == row["label"]
    assert found["winogrande", 0, "acc"] == right / 9


@needs_data
def test_lambada_by_hand_with_a_real_tokenizer():
    model, encode = tiny(256, 50304), neox_tokenizer().encode
    results = evaluate(model, ["lambada"], limit=8, batch_size=3, tokenizer=neox_tokenizer())
    with gzip.open(f"{DATA}/eval/lambada_openai_test.jsonl.gz", "rt") as lines:
        rows = [json.loads(next(lines)) for _ in range(8)]
    total = sum(
        s for s, _ in by_hand(model, encode, [(r["context"], " " + r["target"]) for r in rows])
    )
    assert metrics(results)["lambada", 0, "perplexity"] == pytest.approx(
        math.exp(-total / 8), rel=1e-5
    )


def test_batches_do_not_change_the_numbers(data):
    model = crosslayer.connect(tiny(256), "mudd")
    shake(model)
    one, many = (measure(model, data, fewshot=[0, 2], batch_size=n) for n in (1, 7))
    assert one == pytest.approx(many, rel=1e-5)


def test_prenorm_scores_exactly_what_its_host_does(data):
    assert measure(tiny(), data) == measure(crosslayer.connect(tiny(), "prenorm"), data)


@pytest.mark.parametrize("arm", ["mudd", "hyper"])
def test_a_saved_model_scores_what_it_did(arm, data, tmp_path):
    model = crosslayer.connect(tiny(), arm)
    shake(model)
    before = measure(model, data)
    assert before != measure(tiny(), data)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    results = evaluate(tmp_path / "model", ["lambada", "piqa", "winogrande"], data=data)
    assert metrics(results) == before and results["settings"]["arm"] == arm


def test_bfloat16(data, tmp_path):
    model = crosslayer.connect(tiny(), "mudd")
    model.save_pretrained(tmp_path / "model")
    full, half = (
        evaluate(
            tmp_path / "model", ["lambada"], data=data, dtype=dtype, tokenizer=byte_tokenizer()
        )
        for dtype in ("float32", "bfloat16")
    )
    assert (
        half["settings"]["dtype"] == "bfloat16"
        and half["settings"]["weights"] != full["settings"]["weights"]
    )
    values = [metrics(results)["lambada", 0, "perplexity"] for results in (full, half)]
    assert values[0] != values[1] and math.log(values[1]) == pytest.approx(
        math.log(values[0]), rel=0.02
    )
    # the log-probabilities are of the model's bf16 logits, but taken in float32
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    rows = small_rows(TASKS["lambada"].fields)
    scores = by_hand(
        loaded, byte_tokenizer().encode, [(r["context"], " " + r["target"]) for r in rows]
    )
    one = evaluate(loaded, ["lambada"], data=data, tokenizer=byte_tokenizer(), batch_size=1)
    expected = math.exp(-sum(s for s, _ in scores) / len(rows))
    assert metrics(one)["lambada", 0, "perplexity"] == pytest.approx(expected, rel=1e-5)


class Recorder(LM):
    def __init__(self):
        super().__init__()
        self.requests = []

    def loglikelihood(self, requests):
        self.requests += [request.args for request in requests]
        return [(0.0, False) for _ in requests]

    loglikelihood_rolling = generate_until = loglikelihood


def test_examples_are_never_the_document_itself(tmp_path):
    rows = small_rows(TASKS["piqa"].fields, 6)
    file, lm = write_lines(tmp_path / "piqa.jsonl", rows), Recorder()
    run(lm, "piqa", file, shots=5, limit=None, seed=1)
    contexts = list(dict.fromkeys(context for context, _ in lm.requests))
    shown = [f"Question: {r['context']}\nAnswer: {r['choices'][r['label']]}" for r in rows]
    for i, context in enumerate(contexts):
        *examples, question = context.split("\n\n")
        assert question == f"Question: {rows[i]['context']}\nAnswer:"
        assert sorted(examples) == sorted(shown[:i] + shown[i + 1 :])
    again, other = Recorder(), Recorder()
    run(again, "piqa", file, shots=5, limit=None, seed=1)
    run(other, "piqa", file, shots=5, limit=None, seed=2)
    assert again.requests == lm.requests != other.requests
    with pytest.raises(ValueError, match="6 documents are too few for 6 examples and one more"):
        run(lm, "piqa", file, shots=6, limit=None, seed=1)


def test_an_answer_longer_than_the_window(data):
    with pytest.raises(ValueError, match="piqa: an answer does not fit the window of 8 tokens"):
        measure(tiny(), data, ["piqa"], context=8)


def test_a_tokenizer_is_left_as_it_was(data):
    bare = byte_tokenizer(None)
    first = measure(tiny(64, 256), data, ["copa"], tokenizer=bare)
    assert bare.pad_token is None and len(bare) == 256
    assert measure(tiny(64, 256), data, ["copa"], tokenizer=bare) == first


def test_stopped_and_started_again(data, tmp_path):
    tasks, options = (
        ["copa", "piqa", "boolq"],
        {"data": data, "tokenizer": byte_tokenizer(), "out": tmp_path / "out"},
    )
    seen = []

    def stop(job, index, count):
        seen.append((str(job), index, count))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny(), tasks, watch=stop, **options)
    held = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["task"] for row in held["results"]] == ["copa", "piqa"]
    results = evaluate(tiny(), tasks, watch=stop, **options)
    assert seen[3:] == [("boolq, 0-shot", 2, 3)] and results["results"][:2] == held["results"]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["results.json"]
    assert metrics(results) == measure(tiny(), data, tasks)
    evaluate(tiny(), tasks, watch=stop, **options)
    assert len(seen) == 4, "nothing is done twice"

    changed = tiny()
    with torch.no_grad():
        changed.lm_head.weight.add_(0.01)
    with pytest.raises(ValueError, match="belongs to another evaluation, with weights"):
        evaluate(changed, tasks, **options)
    with pytest.raises(
        ValueError, match="belongs to another evaluation, with limit None where this one has 3"
    ):
        evaluate(tiny(), tasks, limit=3, **options)
    (tmp_path / "out" / "results.json").write_text("{")
    with pytest.raises(ValueError, match="not an evaluation's results"):
        evaluate(tiny(), tasks, **options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"not empty and without results\.json"):
        evaluate(tiny(), tasks, **options | {"out": tmp_path / "other"})


def test_a_changed_file_is_measured_again(tmp_path):
    data = small_folder(tmp_path / "eval")
    options = {"data": data, "tokenizer": byte_tokenizer(), "out": tmp_path / "out"}
    first = evaluate(tiny(), ["copa"], **options)
    write_lines(data / "copa_val.jsonl", small_rows(TASKS["copa"].fields, 5))
    second = evaluate(tiny(), ["copa"], **options)
    assert [r["results"][0]["n"] for r in (first, second)] == [9, 5]
