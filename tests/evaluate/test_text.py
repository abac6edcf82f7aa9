"""Perplexity of texts and of target spans against loops of their own."""

import gzip
import json
import math
import statistics

import pytest
from lm_eval.api.instance import Instance

import crosslayer
from crosslayer.evaluate import evaluate
from crosslayer.evaluate.harness import open_model
from crosslayer.evaluate.text import examples, parts, perplexity, rolling, spans
from tests.evaluate.lms import byte_tokenizer, log_probabilities, shake, tiny, write_lines

TEXT = "".join(
    f"{i}: the quick brown fox, “naïve”, jumps over {i * i} lazy dogs.\n" for i in range(9)
)
SHORT = "A second text.\n"
END = 256


def model():
    connected = crosslayer.connect(tiny(32), "mudd")
    shake(connected)
    return connected


def lm(**options):
    return open_model(model(), **{"tokenizer": byte_tokenizer(), "batch_size": 5, **options})


def loss_by_hand(host, tokens: list[int], context: int, stride: int) -> tuple[float, int]:
    """Nats of every token after the first, each from a window that ends where its stride does."""
    total, at = 0.0, 1  # tokens[0] is what the others follow
    ends = [*range(context + 1, len(tokens), stride), len(tokens)]
    for end in ends:
        window = tokens[max(0, end - context - 1) : end]
        total -= log_probabilities(host, window)[-(end - at) :].sum().item()
        at = end
    assert at == len(tokens)
    return total, len(tokens) - 1


@pytest.mark.parametrize("stride", [None, 1, 7, 32])
@pytest.mark.parametrize("end", ["<|endoftext|>", None], ids=["after-eos", "bare"])
def test_text_by_hand(tmp_path, stride, end):
    file = tmp_path / "text.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf8") as lines:
        lines.write("".join(json.dumps({"text": text}) + "\n" for text in (TEXT, SHORT)))
    host, tokenizer = model(), byte_tokenizer(end)
    results = evaluate(host, text=[file], stride=stride, tokenizer=tokenizer, batch_size=5)
    nats = count = size = 0
    for text in (TEXT, SHORT):
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text.encode())
        found = loss_by_hand(host, [END, *tokens] if end else tokens, 32, stride or 32)
        nats, count, size = nats + found[0], count + found[1], size + len(tokens) - (not end)
    (row,) = results["results"]
    assert row["task"] == "text text.jsonl.gz" and row["n"] == count == size
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    assert values == pytest.approx(
        {
            "loss": nats / count,
            "perplexity": math.exp(nats / count),
            "bits_per_byte": nats / math.log(2) / size,
            "word_perplexity": math.exp(nats / len((TEXT + SHORT).split())),
        },
        rel=1e-5,
    )


def test_disjoint_windows_are_the_harness_own():
    wrapped = lm()
    (total,) = wrapped.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)])
    found = perplexity(wrapped, [TEXT], None)
    assert found["metrics"]["loss"]["value"] * found["n"] == pytest.approx(-total, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("stride", [1, 5, 31, 32])
def test_every_token_is_scored_once(length, stride):
    tokens = list(range(length))
    for before in (-1, None):
        windows = rolling(tokens, before, 32, stride)
        whole = [before, *tokens] if before is not None else tokens
        assert [t for _, scored in windows for t in scored] == whole[1:]
        for seen, scored in windows:
            assert len(seen) + len(scored) - 1 <= 32
            end = whole.index(scored[-1]) + 1
            assert [*seen, *scored] == whole[end - len(seen) - len(scored) : end]
            assert len(seen) >= min(32 - stride + 1, whole.index(scored[0]))


SPANS = [
    ("Question: is it? Answer:", " yes, it is"),
    ("Translate: chat", "\ncat"),
    ("A context that is longer than the window of the model and is cut from the left. So:", " no"),
    ("", "nothing before it"),
    ("trailing space ", "and words"),
    ("Long: ", "a target that is a good deal longer than the window of the model can hold at once"),
]


def spans_by_hand(host, pairs, context=32):
    encode, nats, counts = byte_tokenizer().encode, [], []
    for seen, target in pairs:
        if seen != seen.rstrip():
            seen, target = seen.rstrip(), seen[len(seen.rstrip()) :] + target
        seen, scored = encode(seen) if seen else [END], encode(target)
        step = context if len(scored) <= context else context // 2
        total = 0.0
        for i in range(0, len(scored), step):
            part = scored[i : i + step]
            window = (seen + scored[:i] + part)[-(context + 1) :]
            total -= log_probabilities(host, window)[-len(part) :].sum().item()
        nats.append(total)
        counts.append(len(scored))
    return nats, counts


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "fields", [("context", "target"), ("input", "target"), ("inputs", "targets")]
)
def test_spans_by_hand(tmp_path, batch_size, fields):
    file = write_lines(
        tmp_path / "flan.jsonl", [dict(zip(fields, pair, strict=True)) for pair in SPANS]
    )
    host = model()
    (row,) = evaluate(host, spans=[file], tokenizer=byte_tokenizer(), batch_size=batch_size)[
        "results"
    ]
    nats, counts = spans_by_hand(host, SPANS)
    each = [total / count for total, count in zip(nats, counts, strict=True)]
    assert row["task"] == "spans flan.jsonl" and row["n"] == 6 and row["tokens"] == sum(counts)
    assert row["truncated"] == 3
    found = row["metrics"]
    assert found["loss"]["value"] == pytest.approx(sum(nats) / sum(counts), rel=1e-5)
    assert found["perplexity"]["value"] == pytest.approx(
        math.exp(sum(nats) / sum(counts)), rel=1e-5
    )
    assert found["loss_by_example"]["value"] == pytest.approx(statistics.mean(each), rel=1e-5)
    assert found["loss_by_example"]["stderr"] == pytest.approx(
        statistics.stdev(each) / math.sqrt(6), rel=1e-4
    )


def test_spans_that_part_one_text_at_different_places():
    """The harness takes these for one request; each is a span of its own."""
    pairs = [
        ("One text", " parted"),
        ("One", " text parted"),
        ("One text p", "arted"),
        ("One text", " parted"),
    ]
    host = model()
    found = spans(open_model(host, byte_tokenizer()), pairs)
    nats, counts = spans_by_hand(host, pairs)
    assert found["metrics"]["loss"]["value"] == pytest.approx(sum(nats) / sum(counts), rel=1e-5)


@pytest.mark.parametrize(
    ("seen", "scored"), [(3, 5), (40, 5), (3, 32), (3, 33), (40, 100), (1, 70)]
)
def test_parts_score_every_target_token_once(seen, scored):
    tokens = list(range(seen + scored))
    found = list(parts((tokens[:seen], tokens[seen:]), 32))
    assert [t for _, part in found for t in part] == tokens[seen:]
    for before, part in found:
        assert before and len(before) + len(part) <= 33
        assert before + part == tokens[before[0] : part[-1] + 1]
        assert len(before) + len(part) == min(33, part[-1] + 1)


def test_spans_limit_and_bad_lines(tmp_path):
    file = write_lines(
        tmp_path / "spans.jsonl", [{"context": "a", "target": "b"}, {"context": "a"}]
    )
    with pytest.raises(
        ValueError,
        match=r'line 2 needs a "context" \(or "input"\) and a "target" .* it has context',
    ):
        examples(file)
    file = write_lines(tmp_path / "spans.jsonl", [{"context": "a", "target": "b"}] * 5)
    (row,) = evaluate(model(), spans=[file], limit=3, tokenizer=byte_tokenizer())["results"]
    assert row["n"] == 3
