"""Tasks of lm-evaluation-harness on connected models, by task files on local data."""

import json
import math
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from crosslayer.convert import open_model
from crosslayer.evaluate import evaluate_tasks, find_tasks
from crosslayer.evaluate.harness_tasks import check_task_names
from tests.evaluate.conftest import CHOICE_TASK, QUESTIONS, SENTENCES
from tests.evaluate.tiny_models import (
    byte_tokenizer,
    log_probabilities,
    tiny_model,
    write_lines,
)

TASKS = ["local_choice", "local_word"]


def evaluate(model, include_path, tasks=TASKS, tokenizer=None, **options) -> dict:
    manager = find_tasks(tasks, include_path)
    return evaluate_tasks(model, tokenizer or byte_tokenizer(), tasks, manager, **options)


def values(results: dict) -> dict[tuple[str, str], float]:
    return {
        (task, key.split(",")[0]): value
        for task, metrics in results["results"].items()
        for key, value in metrics.items()
        if isinstance(value, float) and "stderr" not in key
    }


def log_likelihood(model, context: str, continuation: str) -> float:
    encode = byte_tokenizer().encode
    scores = log_probabilities(model, encode(context + continuation))
    return scores[len(encode(context)) - 1 :].sum().item()


def test_metrics_equal_those_by_hand(include_path):
    model = tiny_model("mudd")
    measured = values(evaluate(model, include_path))
    right = right_by_length = 0
    for row in QUESTIONS:
        prompt = f"Question: {row['question']}\nAnswer:"
        scores = [log_likelihood(model, prompt, " " + choice) for choice in row["choices"]]
        by_length = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["label"]
        right_by_length += by_length.index(max(by_length)) == row["label"]
    assert measured["local_choice", "acc"] == right / len(QUESTIONS)
    assert measured["local_choice", "acc_norm"] == right_by_length / len(QUESTIONS)
    nats = -sum(log_likelihood(model, row["context"], " " + row["target"]) for row in SENTENCES)
    expected = math.exp(nats / len(SENTENCES))
    assert measured["local_word", "perplexity"] == pytest.approx(expected, rel=1e-5)


def test_a_bfloat16_model_is_scored_in_float32(include_path):
    model = tiny_model().bfloat16()
    measured = values(evaluate(model, include_path, ["local_word"], batch_size=1))
    nats = -sum(log_likelihood(model, row["context"], " " + row["target"]) for row in SENTENCES)
    expected = math.exp(nats / len(SENTENCES))
    assert measured["local_word", "perplexity"] == pytest.approx(expected, rel=1e-5)


def test_few_shot_and_limit(include_path):
    model = tiny_model(context=256)
    results = evaluate(model, include_path, ["local_choice"], num_fewshot=2, limit=4)
    assert results["n-shot"]["local_choice"] == 2
    assert results["n-samples"]["local_choice"]["effective"] == 4


def test_a_template_that_does_not_fit_its_documents(include_path, tmp_path):
    task = (include_path / "word.yaml").read_text().replace("{{context}}", "{{sentence}}")
    (tmp_path / "wrong.yaml").write_text(task.replace("local_word", "wrong"))
    with pytest.raises(ValueError, match="a template of wrong does not fit its documents"):
        evaluate(tiny_model(), tmp_path, ["wrong"])


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "of faulty .(StopIteration.; check the task's file|SchemaInferenceError)"),
        ([{**QUESTIONS[0], "label": 7}], {}, "cannot make its requests of faulty .IndexError"),
        (QUESTIONS, {"num_fewshot": 100}, "more of these than --num-fewshot"),
    ],
)
def test_documents_that_do_not_fit_a_task(documents, options, message, tmp_path):
    file = write_lines(tmp_path / "documents.jsonl", documents)
    task = CHOICE_TASK.format(file=file, cache=json.dumps(str(tmp_path / "cache")))
    (tmp_path / "faulty.yaml").write_text(task.replace("local_choice", "faulty"))
    with pytest.raises(ValueError, match=message) as error:
        evaluate(tiny_model(), tmp_path, ["faulty"], **options)
    assert "\n" not in str(error.value)


def test_documents_and_task_files_that_cannot_be_read(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": \n')
    task = CHOICE_TASK.format(
        file=tmp_path / "broken.jsonl", cache=json.dumps(str(tmp_path / "cache"))
    )
    (tmp_path / "broken.yaml").write_text(task.replace("local_choice", "broken"))
    with pytest.raises(ValueError, match=r"cannot read the data of broken .*JSON"):
        evaluate(tiny_model(), tmp_path, ["broken"])
    (tmp_path / "broken.yaml").write_text("task: broken\n  metrics: [\n")
    with pytest.raises(ValueError, match=r"broken\.yaml: .*line 2"):
        find_tasks(["broken"], tmp_path)


def test_batch_size_changes_nothing(include_path):
    model = tiny_model("hyper")
    one = values(evaluate(model, include_path, batch_size=1))
    assert values(evaluate(model, include_path, batch_size=7)) == pytest.approx(one, rel=1e-5)


def test_prenorm_equals_its_host(include_path):
    host = values(evaluate(tiny_model(), include_path))
    assert host == values(evaluate(tiny_model("prenorm"), include_path))
    assert host != values(evaluate(tiny_model("mudd"), include_path))


def test_a_saved_model_scores_the_same(include_path, tmp_path):
    model = tiny_model("mudd")
    model.save_pretrained(tmp_path / "model")
    saved = open_model(tmp_path / "model")
    assert values(evaluate(saved, include_path)) == values(evaluate(model, include_path))


def test_the_tokenizer_is_not_changed(include_path):
    """Not even one without BOS and EOS, which the harness gives a padding token."""
    tokenizer = byte_tokenizer(None)
    evaluate(tiny_model(vocab=256), include_path, tokenizer=tokenizer)
    assert tokenizer.pad_token is None and len(tokenizer) == 256


def test_an_unknown_task_names_the_nearest():
    lambada = Path(lm_eval.tasks.__file__).parent / "lambada"
    manager = TaskManager(include_path=lambada, include_defaults=False)
    check_task_names(["lambada_openai", "lambada_o*"], manager)
    with pytest.raises(ValueError, match=r"'lambada_opena' \(did you mean 'lambada_openai'\?\)"):
        check_task_names(["lambada_openai", "lambada_opena"], manager)


def test_data_without_a_network_is_one_line(include_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'nobody/has-this' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"cannot load the data of remote .*Couldn't reach"
    ) as error:
        evaluate(tiny_model(), include_path, ["remote"])
    assert "\n" not in str(error.value)


def test_an_error_of_the_data_without_words(include_path, monkeypatch):
    def time_out(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(datasets, "load_dataset", time_out)
    with pytest.raises(ValueError, match=r"cannot load the data of remote \(TimeoutError\)"):
        evaluate(tiny_model(), include_path, ["remote"])


def test_an_assertion_of_the_model_is_not_about_the_context(include_path, monkeypatch):
    model = tiny_model()
    plain_forward = model.forward

    def forward(input_ids, **options):
        assert input_ids.shape[1] <= 4, "one of the model's own"
        return plain_forward(input_ids, **options)

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(AssertionError, match="one of the model's own"):
        evaluate(model, include_path)


def test_the_mode_of_the_model_is_not_changed(include_path):
    model = tiny_model().train()
    evaluate(model, include_path, ["local_word"])
    assert all(module.training for module in model.modules())


def test_an_answer_longer_than_the_context(include_path):
    with pytest.raises(ValueError, match="an answer longer than the context of 3 tokens"):
        evaluate(tiny_model(), include_path, ["local_word"], context=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit must be a whole number of at least 1, got 0"),
        ({"num_fewshot": -1}, "num_fewshot must be a number of at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_options_out_of_range(options, message, include_path):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_model(), include_path, **options)
