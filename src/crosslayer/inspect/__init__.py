"""What a trained connection does: the papers' analyses, for any model that `connect` knows.

batches = [{"input_ids": ids, "attention_mask": mask}]
unfolded = crosslayer.inspect.unfold_connections(model, batches)
unfolded.mean          # c_kj of every input k and source j
"""
