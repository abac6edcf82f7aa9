"""What a language model can do: tasks of lm-evaluation-harness, and perplexity of texts and of
target spans.

from crosslayer.evaluate import evaluate_tasks, text_perplexity

results = evaluate_tasks(model, tokenizer, ["lambada_openai", "piqa"], num_fewshot=5)
perplexity = text_perplexity(model, tokenizer, [Path("novel.txt").read_text()])
"""

from .harness_tasks import evaluate_tasks, find_tasks
from .joined_documents import joined_perplexity
from .perplexity import TextPerplexity, text_perplexity
from .spans import Span, SpanPerplexity, read_spans, span_perplexity
from .texts import EncodedText, describe_documents, describe_stream

__all__ = [
    "EncodedText",
    "Span",
    "SpanPerplexity",
    "TextPerplexity",
    "describe_documents",
    "describe_stream",
    "evaluate_tasks",
    "find_tasks",
    "joined_perplexity",
    "read_spans",
    "span_perplexity",
    "text_perplexity",
]
