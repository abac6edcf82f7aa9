"""The parameters: their dtype, initial values, weight decay, copies."""

import copy
import io
import pickle

import torch
from torch import nn

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.testing.tiny_model import (
    DEFAULT_SPECS,
    equal_tensors,
    loss_and_gradients,
    perturb_weights,
    tiny_gpt,
    token_ids,
)

from .shared import every_option, every_sequential, every_variant


@every_option
def test_no_parameter_is_dead(spec, parallel):
    model = tiny_gpt(spec, parallel)
    _, gradients = loss_and_gradients(model, token_ids())
    alive = {name for name, gradient in gradients.items() if gradient.abs().max() > 0}
    assert alive == {name for name, p in model.named_parameters() if p.requires_grad}


@every_variant
def test_parameters_follow_the_conventions(spec, parallel):
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    make = crosslayer.make(spec)

    def norm(port):
        return nn.RMSNorm(6)

    with torch.device("meta"):
        for site in crosslayer.plan(4, parallel):
            assert all(p.is_meta for p in make(site, 6, norm).parameters())
    sites = [make(site, 6, norm) for site in crosslayer.plan(4, parallel)]
    assert torch.equal(random_state, torch.get_rng_state()), (
        "building a connection must not change the global random state: use assign_normal"
    )
    names = {name for site in sites for name, _ in site.named_parameters(recurse=False)}
    if spec in DEFAULT_SPECS:
        assert make.method.weight_decay_params <= names
    for site in sites:
        parameters = dict(site.named_parameters(recurse=False))
        for p in parameters.values():
            assert p.dim() >= 1 and p.dtype == torch.float32, "use float32_parameter"
        initial = {name: p.detach().clone() for name, p in parameters.items()}
        perturb_weights(site)
        site.reset_parameters()
        assert equal_tensors(initial, {name: p.detach() for name, p in parameters.items()}), (
            "reset_parameters must restore the initial values"
        )
        for p in parameters.values():  # as others cast it
            p.data = torch.full_like(p, 3, dtype=torch.bfloat16)
        site.reset_parameters()
        rounded = {name: value.bfloat16() for name, value in initial.items()}
        assert equal_tensors(rounded, {name: p.detach() for name, p in parameters.items()})


@every_variant
def test_weight_decay_keeps_the_initial_function(spec, parallel):
    """Weight decay shrinks the generators of coefficients, not the static part.

    Where the parameters that decay are zero, the model is the one training starts from. DenseFormer
    and its baseline are the exceptions: their authors' code decays α and the gains.
    """
    model = tiny_gpt(spec, parallel, perturbed=False)
    ids = token_ids()
    initial = model(ids)
    groups = crosslayer.param_groups(model, 1e-3, 0.1)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    with torch.no_grad():
        for connection in find_connections(model):
            for parameter in connection.parameters(recurse=False):
                if id(parameter) in decayed:
                    parameter.zero_()
    decays_static_part = crosslayer.make(spec).name in ("denseformer", "skip_gain")
    is_kept = torch.allclose(model(ids), initial, rtol=1e-6, atol=1e-6)
    assert is_kept != decays_static_part, (
        "weight decay moves the model away from where training starts: leave what is not zero at "
        "the start out of weight_decay_params"
    )


@every_sequential
def test_copies_pickles_and_saves_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    file = io.BytesIO()
    loss_and_gradients(model, ids)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected_loss, expected_gradients = loss_and_gradients(model, ids)
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = tiny_gpt(spec, parallel, perturbed=False)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        loss, gradients = loss_and_gradients(twin, ids)
        assert torch.equal(loss, expected_loss) and equal_tensors(gradients, expected_gradients)
