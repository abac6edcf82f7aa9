"""examples/gpt.py: what its loss is of."""

import torch

import examples.gpt


def test_each_byte_is_predicted_from_those_before_it(monkeypatch):
    ids, targets = [], []
    forward, cross_entropy = examples.gpt.GPT.forward, torch.nn.functional.cross_entropy

    def record_ids(self, x):
        ids.append(x)
        return forward(self, x)

    def record_targets(logits, labels):
        targets.append(labels)
        return cross_entropy(logits, labels)

    monkeypatch.setattr(examples.gpt.GPT, "forward", record_ids)
    monkeypatch.setattr(examples.gpt.F, "cross_entropy", record_targets)
    examples.gpt.main("prenorm", steps=1)
    assert torch.equal(targets[0].view_as(ids[0])[:, :-1], ids[0][:, 1:])
    model = examples.gpt.GPT("mudd", layers=1)
    changed = ids[0].clone()
    changed[:, 9] = 0
    same = (model(changed) == model(ids[0])).all(-1)
    assert same[:, :9].all() and not same[:, 9].any(), "causal"
