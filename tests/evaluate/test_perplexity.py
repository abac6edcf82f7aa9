"""Perplexity of texts and of target spans against loops that score one window at a time."""

import codecs
import copy
import gzip
import math
import statistics

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from crosslayer.data.token_streams import TokenStream
from crosslayer.data.tokenizing import load_tokenizer
from crosslayer.evaluate import (
    Span,
    joined_perplexity,
    read_spans,
    span_perplexity,
    text_perplexity,
    windows,
)
from crosslayer.evaluate.language_models import (
    check_logits,
    encode_without_end,
    end_tokens,
    find_first_token,
)
from crosslayer.evaluate.perplexity import TextPerplexity
from crosslayer.evaluate.texts import describe_documents, describe_stream
from crosslayer.evaluate.windows import (
    ScoredWindow,
    log_likelihoods,
    rolling_windows,
    split_window,
)
from crosslayer.losses import exp_or_inf
from tests.evaluate.tiny_models import (
    END_OF_TEXT,
    byte_tokenizer,
    log_probabilities,
    tiny_model,
    write_lines,
)

TEXT = "".join(f"{i}: the quick “naïve” fox jumps over {i * i} lazy dogs.\n" for i in range(9))
SHORT = "“A” second text.\n"  # its first token is a part of a character
END = 256
CONTEXT = 32


@pytest.fixture(scope="module")
def model():
    return tiny_model("mudd", CONTEXT)


def nats_by_hand(model, tokens: list[int], stride: int) -> float:
    """Of every token after the first, each in a window that ends where its stride ends."""
    total, scored = 0.0, 1
    for end in [*range(CONTEXT + 1, len(tokens), stride), len(tokens)]:
        window = tokens[max(0, end - CONTEXT - 1) : end]
        total -= log_probabilities(model, window)[-(end - scored) :].sum().item()
        scored = end
    return total


@pytest.mark.parametrize(
    ("stride", "end"),
    [(None, "<|endoftext|>"), (11, None)],
    ids=["disjoint-after-eos", "overlapping-without-eos"],
)
def test_text_by_hand(model, stride, end):
    tokenizer = byte_tokenizer(end)
    result = text_perplexity(model, tokenizer, [TEXT, SHORT], stride=stride, batch_size=5)
    nats = count = text_tokens = 0
    for text in (TEXT, SHORT):
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text.encode())
        text_tokens += len(tokens)
        if end is not None:
            tokens = [END, *tokens]
        nats += nats_by_hand(model, tokens, stride or CONTEXT)
        count += len(tokens) - 1
    expected = {
        "tokens": count,
        "loss": nats / count,
        "perplexity": math.exp(nats / count),
        "bits_per_byte": nats / math.log(2) / count,
        "word_perplexity": math.exp(nats / count * text_tokens / len((TEXT + SHORT).split())),
    }
    assert result._asdict() == pytest.approx(expected, rel=1e-5)


def test_text_equals_the_harness_rolling_loglikelihood(model):
    harness_model = HFLM(
        pretrained=model, tokenizer=byte_tokenizer(), batch_size=5, softmax_dtype="float32"
    )
    request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
    (total,) = harness_model.loglikelihood_rolling([request])
    result = text_perplexity(model, byte_tokenizer(), [TEXT])
    assert result.loss * result.tokens == pytest.approx(-total, rel=1e-6)


def test_joined_documents_by_hand(model):
    """Windows without overlap, of documents with a separator between; a short stream is one."""
    tokenizer = byte_tokenizer()
    stream = [*tokenizer.encode(TEXT), END, *tokenizer.encode(SHORT)]
    size = CONTEXT + 1
    rows = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    nats = -sum(log_probabilities(model, row).sum().item() for row in rows)
    result = joined_perplexity(model, tokenizer, [TEXT, "", SHORT], batch_size=3)
    assert result.tokens == len(rows) * CONTEXT
    assert result.loss == pytest.approx(nats / result.tokens, rel=1e-5)
    # a separator counts as a byte, so a token of this tokenizer is one
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2), rel=1e-6)
    assert joined_perplexity(model, tokenizer, ["abc"]).tokens == 2


def test_a_text_without_tokens(model):
    with pytest.raises(ValueError, match="the text has no token to score"):
        text_perplexity(model, byte_tokenizer(None), ["", "a"])


@pytest.mark.parametrize(
    ("length", "stride"), [(1, 5), (2, 1), (33, 5), (34, 32), (100, 1), (100, 32)]
)
def test_rolling_windows_score_every_token_once(length, stride):
    tokens = list(range(length))
    windows = rolling_windows(tokens, CONTEXT, stride)
    assert [token for window in windows for token in window.target] == tokens[1:]
    for window in windows:
        start, end = window.seen[0], window.target[-1] + 1
        assert window.seen + window.target == tokens[start:end]
        assert len(window.seen) + len(window.target) <= CONTEXT + 1
        assert len(window.seen) >= min(CONTEXT - stride + 1, window.target[0])


SPANS = [
    Span("Question: is it? Answer:", " yes, it is"),
    Span("Translate: chat", "\ncat"),
    Span("A context that is longer than the window of the model and is truncated. So:", " no"),
    Span("", "nothing before it"),
    Span("trailing space ", "and words"),
    Span("Long: ", "a target that is a good deal longer than the window of the model can hold"),
]


def span_nats_by_hand(model, spans: list[Span]) -> tuple[list[float], list[int]]:
    encode = byte_tokenizer().encode
    nats, counts = [], []
    for context, target in spans:
        space = context[len(context.rstrip()) :]
        seen, scored = encode(context.rstrip()) or [END], encode(space + target)
        piece = CONTEXT if len(scored) <= CONTEXT else CONTEXT // 2
        total = 0.0
        for i in range(0, len(scored), piece):
            part = scored[i : i + piece]
            window = (seen + scored[:i] + part)[-(CONTEXT + 1) :]
            total -= log_probabilities(model, window)[-len(part) :].sum().item()
        nats.append(total)
        counts.append(len(scored))
    return nats, counts


def test_spans_by_hand(model):
    result = span_perplexity(model, byte_tokenizer(), SPANS, batch_size=4)
    nats, counts = span_nats_by_hand(model, SPANS)
    losses = [total / count for total, count in zip(nats, counts, strict=True)]
    expected = {
        "spans": 6,
        "tokens": sum(counts),
        "truncated": 3,
        "loss": sum(nats) / sum(counts),
        "perplexity": math.exp(sum(nats) / sum(counts)),
        "loss_by_span": statistics.mean(losses),
        "loss_by_span_stderr": statistics.stdev(losses) / math.sqrt(6),
    }
    assert result._asdict() == pytest.approx(expected, rel=1e-5)


def test_a_tokenizer_that_ends_texts_scores_the_same_spans(model):
    """As BERT's does: the end of the context is no token of the text."""
    ending = byte_tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, END)]
    )
    assert ending.encode("a")[-1] == END
    spans = SPANS[1:3]
    assert span_perplexity(model, ending, spans) == span_perplexity(model, byte_tokenizer(), spans)


@pytest.mark.parametrize(("length", "truncated"), [(CONTEXT + 1, 0), (CONTEXT + 2, 1)])
def test_a_span_that_just_fits_is_not_truncated(model, length, truncated):
    """The last token is predicted and never seen."""
    span = Span("a" * (length - 1), "b")
    assert span_perplexity(model, byte_tokenizer(), [span]).truncated == truncated


def test_what_a_tokenizer_puts_before_a_text_is_kept():
    """Of a BOS and an EOS the BOS, which is also the first token of a text without any."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {END_OF_TEXT}", special_tokens=[("<s>", bos), (END_OF_TEXT, END)]
    )
    plain = byte_tokenizer().encode("ab")
    assert tokenizer.encode("ab") == [bos, *plain, END]
    assert encode_without_end(tokenizer, "ab") == [bos, *plain]
    assert find_first_token(tokenizer, tiny_model()) == bos != END
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    written = encode_without_end(tokenizer, f"ab{END_OF_TEXT}")
    assert written == [bos, *plain, END], "an end that is written in the text is scored"


def test_the_tokens_that_end_a_text():
    """The tokenizer's, or else all of the model's generation config, the first one first."""
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 3]
    assert end_tokens(byte_tokenizer(), model) == [END]
    assert end_tokens(byte_tokenizer(None), model) == [7, 3]
    assert find_first_token(byte_tokenizer(None), model) == 7


def test_documents_of_token_ids():
    """Their bytes and words are those of the texts, whatever the size of a token is."""
    texts = ["the cat sat", "on the mat"]
    tokenizer = load_tokenizer("bpe:262", lambda: texts * 9)
    first, second = tokenizer.encode(texts)
    assert len(first) < 11
    stream = TokenStream(np.concatenate([first, [tokenizer.end], second]), tokenizer.vocab, 22)
    whole = describe_stream(stream, tokenizer)
    assert (whole.text_bytes, whole.words) == (22, 6)
    documents = describe_documents(stream, tokenizer)
    assert [(one.text_bytes, one.words) for one in documents] == [(11, 3), (10, 3)]


def test_one_span_has_no_standard_error(model):
    result = span_perplexity(model, byte_tokenizer(), SPANS[:1])
    assert result.loss_by_span_stderr is None and result.loss_by_span == result.loss
    of_each = [span_perplexity(model, byte_tokenizer(), [span]).loss for span in SPANS[:2]]
    of_both = span_perplexity(model, byte_tokenizer(), SPANS[:2])
    half = abs(of_each[0] - of_each[1]) / 2
    assert of_both.loss_by_span_stderr == pytest.approx(half, rel=1e-4)


def test_a_target_that_joins_its_context_is_no_span(model):
    joining = byte_tokenizer()
    joining.backend_tokenizer.normalizer = normalizers.Replace("hat", "h")
    spans = [Span("h", "at"), SPANS[0]]
    assert span_perplexity(model, joining, spans) == span_perplexity(model, joining, spans[1:])


def test_a_context_without_a_token_is_like_none(model):
    silent = byte_tokenizer()
    silent.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    spans = [span_perplexity(model, silent, [Span(text, "at")]) for text in ("~", "")]
    assert spans[0] == spans[1]


@pytest.mark.parametrize("context", [1, 3])
def test_a_model_of_few_positions_is_asked_whether_it_is_causal(context):
    config = GPT2Config(vocab_size=16, n_positions=context, n_embd=8, n_layer=1, n_head=2)
    check_logits(GPT2LMHeadModel(config))


def test_bits_per_byte_of_tokens_of_four_bytes():
    result = TextPerplexity.of_loss(math.log(2), 10, text_tokens=10, text_bytes=40, words=5)
    assert result.bits_per_byte == pytest.approx(1 / 4)


def test_a_model_in_training_is_scored_without_dropout():
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=32, n_layer=1, n_head=2, embd_pdrop=0.5
    )
    model = GPT2LMHeadModel(config).eval()
    expected = log_probabilities(model, [1, 2, 3]).sum().item()
    scores = log_likelihoods(model.train(), [ScoredWindow([1], [2, 3])], 1)
    assert scores == pytest.approx([expected], rel=1e-5)
    assert model.training


def test_a_bfloat16_model_is_scored_in_float32():
    model = tiny_model().bfloat16()
    expected = log_probabilities(model, [1, 2, 3]).sum().item()
    scores = log_likelihoods(model, [ScoredWindow([1], [2, 3])], 1)
    assert scores == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("seen", "scored"), [(3, 5), (40, 5), (3, 32), (3, 33), (40, 100)])
def test_split_windows_score_every_target_token_once(seen, scored):
    tokens = list(range(seen + scored))
    windows = split_window(ScoredWindow(tokens[:seen], tokens[seen:]), CONTEXT)
    assert [token for window in windows for token in window.target] == tokens[seen:]
    for window in windows:
        end = window.target[-1] + 1
        length = min(CONTEXT + 1, end)
        assert window.seen + window.target == tokens[end - length : end]
        assert window.seen


@pytest.mark.parametrize("keys", [("context", "target"), ("inputs", "targets")])
def test_span_files(keys, tmp_path):
    rows = [dict(zip(keys, span, strict=True)) for span in SPANS]
    file = write_lines(tmp_path / "spans.jsonl", rows)
    compressed = tmp_path / "spans.jsonl.gz"
    compressed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_spans(file) == read_spans(compressed) == SPANS
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # as Windows begins a file
    assert read_spans(file) == SPANS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": "a", "target": "b"}\n{"context": "a"}\n', "line 2 needs .* it has context"),
        ('{"context": "a", "target": ""}\n', 'line 1 needs a "context"'),
        ('{"context": "\\ud800", "target": "b"}\n', "line 1 has half of a surrogate pair"),
        ("[1, 2]\n", "line 1: expected an object of JSON, got list"),
        ('{"context": \n', "line 1: not JSON"),
        ("\n", "empty"),
    ],
)  # fmt: skip
def test_span_files_that_are_wrong(content, message, tmp_path):
    (tmp_path / "spans.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_spans(tmp_path / "spans.jsonl")
    damaged = bytearray(gzip.compress(bytes(range(256)) * 9, mtime=0))
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "spans.jsonl.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"spans\.jsonl\.gz: cannot be read"):
        read_spans(tmp_path / "spans.jsonl.gz")
    with pytest.raises(ValueError, match=r"no\.jsonl: cannot be read"):
        read_spans(tmp_path / "no.jsonl")


def test_a_model_that_sees_what_it_is_scored_by():
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, is_decoder=False,
    )  # fmt: skip
    encoder = BertLMHeadModel(config).eval()
    windows = [ScoredWindow([1], [2, 3])]
    with pytest.raises(ValueError, match="BertLMHeadModel sees the tokens that it would be scored"):
        log_likelihoods(encoder, windows, 1)
    config.is_decoder = True
    assert len(log_likelihoods(BertLMHeadModel(config), windows, 1)) == 1


def test_a_weight_that_is_no_number(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_output_embeddings().weight[7] = math.nan
    with pytest.raises(ValueError, match="logits have a NaN"):
        check_logits(broken)
    rare = copy.deepcopy(model)  # only a text with this token tells
    with torch.no_grad():
        rare.get_input_embeddings().weight[77] = math.nan
    check_logits(rare)
    with pytest.raises(ValueError, match="logits have a NaN"):
        log_likelihoods(rare, [ScoredWindow([77], [2, 3])], 1)
    assert math.isnan(exp_or_inf(math.nan)) and exp_or_inf(1e4) == math.inf


def test_a_log_file_has_a_line_of_progress_at_times(model, capsys, monkeypatch):
    text_perplexity(model, byte_tokenizer(), [TEXT])
    assert capsys.readouterr().err == ""  # it took less than a minute
    monkeypatch.setattr(windows, "_LOG_SECONDS", 0)
    text_perplexity(model, byte_tokenizer(), [TEXT], batch_size=5)
    batches = math.ceil(len(TEXT.encode()) / CONTEXT / 5)
    assert f"{batches}/{batches}" in capsys.readouterr().err


def test_context_and_stride_out_of_range(model):
    with pytest.raises(ValueError, match="context must be from 2 to the model's 32, got 33"):
        text_perplexity(model, byte_tokenizer(), [TEXT], context=33)
    with pytest.raises(ValueError, match="context must be from 2 to the model's 32, got 1"):
        text_perplexity(model, byte_tokenizer(), [TEXT], context=1)
    with pytest.raises(ValueError, match="stride must be from 1 to the context of 32, got 40"):
        text_perplexity(model, byte_tokenizer(), [TEXT], stride=40)
