"""What a connected model can do: lm-evaluation-harness on local files, and perplexity of a text or of target spans.

    from crosslayer.evaluate import evaluate

    results = evaluate("pythia-mudd", ["lambada", "piqa"], fewshot=[0, 5], data="eval/")

Scoring is the harness's own (`lm_eval`, its `hf` model class); nothing here reaches for the network. Two things differ
from the harness's defaults: log-probabilities are taken in float32 whatever the model's dtype, and the standard error
of a perplexity comes from 1,000 bootstrap draws. `tasks` says where the tasks differ, `text` what a text's and a
span's numbers mean.
"""

from .run import evaluate
from .tasks import TASKS

__all__ = ["TASKS", "evaluate"]
