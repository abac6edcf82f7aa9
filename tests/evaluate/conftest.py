"""Two tasks of lm-evaluation-harness on local files, and no network."""

import json
import socket

import pytest

from tests.evaluate.tiny_models import write_lines

QUESTIONS = [
    {"question": f"What is {i} and {i}?", "choices": [f"{i}{i}", f"{2 * i}", "no"], "label": i % 3}
    for i in range(9)
]
SENTENCES = [{"context": f"The fox saw {i}", "target": f"dog{'s' * (i % 3)}"} for i in range(6)]
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WORD_TASK = """
task: local_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: " {{{{target}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
REMOTE_TASK = """
task: remote
dataset_path: nobody/has-this
test_split: test
output_type: loglikelihood
doc_to_text: a
doc_to_target: b
"""


@pytest.fixture(scope="module")
def include_path(tmp_path_factory):
    """A folder of task files: local_choice, local_word, and one whose data is on the Hub."""
    root = tmp_path_factory.mktemp("tasks")
    questions = write_lines(root / "questions.jsonl", QUESTIONS)
    sentences = write_lines(root / "sentences.jsonl", SENTENCES)
    cache = json.dumps(str(root / "cache"))
    tasks = root / "tasks"
    tasks.mkdir()
    (tasks / "choice.yaml").write_text(CHOICE_TASK.format(file=questions, cache=cache))
    (tasks / "word.yaml").write_text(WORD_TASK.format(file=sentences, cache=cache))
    (tasks / "remote.yaml").write_text(REMOTE_TASK)
    return tasks


@pytest.fixture(autouse=True)
def no_environment_report(monkeypatch):
    """The harness lists the machine's packages, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to use the network fails the test."""

    attempts = []

    def refuse(*arguments):
        attempts.append(arguments)
        raise OSError("an attempt to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # no pool of processes for a bootstrap
    yield
    assert not attempts
