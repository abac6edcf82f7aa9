"""What the papers' figures show, of models whose answer is known by construction."""

import math
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

from crosslayer.connection import find_connections
from crosslayer.inspect import (
    compare_depths,
    find_alarms,
    find_map_findings,
    measure_cosines,
    measure_scales,
    summarise_mixing,
    unfold_connections,
)
from crosslayer.inspect.ablation import PartAblation, PruningCurve
from crosslayer.inspect.figures import draw_boxes, draw_matrix, label_ticks
from crosslayer.inspect.figures_ablation import draw_ablation, draw_pruning, draw_singular_values
from crosslayer.inspect.figures_connections import (
    distance_panel,
    draw_cosines,
    draw_mix_pattern,
    draw_pattern_gallery,
)
from crosslayer.inspect.figures_scales import draw_gate_boxes, draw_gate_histogram
from crosslayer.inspect.mixing_summary import find_mix_pattern
from crosslayer.inspect.moments import TokenSample
from crosslayer.inspect.observation import SiteVisit
from crosslayer.inspect.similarity import CosineSimilarity, DepthDistances
from tests.inspect.test_analyses import EMBEDDING, OwnModel

pytestmark = pytest.mark.filterwarnings("ignore:connecting")


def axes():
    return Figure().subplots()


# Which weights exist


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        ("denseformer", 90),
        ("denseformer(dilation=4)", 27),
        ("denseformer(dilation=4, period=5)", 5),
        ("denseformer(dilation=2, period=3)", 18),
        ("mudd(window=2, dynamic=False)", 4 * (2 + 10 * 3) + 3),
    ],
)
def test_the_pattern_has_the_papers_number_of_weights(spec, weights):
    pattern = find_mix_pattern(OwnModel(spec, layers=12))
    assert pattern.weights == weights
    assert pattern.learned.shape == (12, 13)


def test_the_pattern_as_a_picture():
    pattern = find_mix_pattern(OwnModel("denseformer(dilation=4, period=5)", layers=12))
    depths = {
        row: columns.nonzero().flatten().tolist()
        for row, columns in zip(pattern.rows, pattern.learned, strict=True)
    }
    assert depths["Y_5"] == [1, 5]
    assert depths["Y_10"] == [2, 6, 10]
    assert depths["Y_12"] == []
    picture = axes()
    draw_mix_pattern(picture, pattern)
    kinds = torch.tensor(picture.collections[0].get_array()).view(12, 13)
    assert (kinds == 1).sum() == 5
    assert (kinds == 2).sum() == 10  # the plain flow of the other depths
    assert kinds[0].nonzero().flatten().tolist() == [1]  # Y_1 = X_1
    assert find_mix_pattern(OwnModel("hyper")) is None


# Maps


def test_the_parallel_block_is_a_jagged_triangle():
    """PTB of Hyper-Connections, Figure 7: the MLP does not read the attention before it."""
    attention = [[0, 0, 1], [1, 1, 0], [0, 0, 1]]
    mlp = [[0, 1, 1], [1, 0, 0], [0, 1, 1]]
    spec = f"hyper(streams=2, dynamic=False, matrix=[{attention}, {mlp}])"
    unfolded = unfold_connections(OwnModel(spec), EMBEDDING)
    expected = torch.ones(9, 9).double().tril()
    for k in range(1, 9, 2):
        expected[k, k] = 0
    assert torch.equal(unfolded.mean[:8], expected[:8])
    assert torch.equal(unfolded.mean[8], torch.full((9,), 2.0).double())  # the sum of two streams
    assert find_map_findings(unfolded).attention_reach == 1


def test_post_norm_decays():
    unfolded = unfold_connections(OwnModel("postnorm"), EMBEDDING)
    assert unfolded.error < 1e-5
    for source in range(8):
        column = unfolded.mean[source:, source]
        assert (column.diff() < 0).all()
    embedding = unfolded.mean[:, 0]
    assert embedding[-1] < 0.1 * embedding[0]


def test_attentions_that_are_forgotten():
    """The two-hop residual: an attention reaches the MLP after it and nothing else."""
    attention = [[0, 0, 1], [1, 1, 0], [0, 0, 0]]
    mlp = [[0, 1, 0], [1, 1, 0], [1, 0, 0]]
    spec = f"hyper(streams=2, dynamic=False, matrix=[{attention}, {mlp}])"
    assert find_map_findings(unfold_connections(OwnModel(spec), EMBEDDING)).attention_reach < 0.1


def test_one_token_is_a_token_of_the_mean():
    model = OwnModel("hyper(streams=2)")
    with torch.no_grad():
        for site in find_connections(model)[:-1]:
            site.dynamic_alpha_fn.normal_()
    tokens = EMBEDDING[0]["embedding"].flatten(0, 1)
    alone = [unfold_connections(model, [{"embedding": x[None, None]}]) for x in tokens]
    unfolded = unfold_connections(model, EMBEDDING)
    errors = [(unfolded.one_token - other.mean).abs().max() for other in alone]
    chosen = min(range(6), key=errors.__getitem__)
    assert errors[chosen] < 1e-5
    assert max(errors) > 1e-3
    for streams, other in zip(unfolded.one_token_streams, alone[chosen].stream_means, strict=True):
        torch.testing.assert_close(streams, other, atol=1e-5, rtol=1e-5)


# Ways


def static_mudd() -> nn.Module:
    """In layer 2, v is the embedding, which layers 0 and 1 read as well; r is X_1."""
    model = OwnModel("mudd(dynamic=False)", layers=3)
    opening = [site for site in find_connections(model) if site.opens_layer]
    with torch.no_grad():
        for site in opening[1:3]:
            site.a.zero_()
            site.a[:3, 0] = 1
            site.a[3, 1] = 1
        opening[2].a[0] = torch.tensor([-1.0, 0, 0])
    return model


def test_cosines_of_each_way_between_layers():
    cosines = measure_cosines(static_mudd(), EMBEDDING)
    assert cosines.block_labels == ["1", "2"]
    assert set(cosines.blocks) == {"q", "k", "v", "r"}
    medians = {way: values[:, 1] for way, values in cosines.blocks.items()}
    torch.testing.assert_close(medians["v"], torch.ones(2).double())
    torch.testing.assert_close(medians["q"], torch.tensor([1.0, -1]).double())
    torch.testing.assert_close(medians["r"][1], torch.tensor(1.0).double())
    assert medians["r"][0] < 0.9  # X_1 against the embedding


def test_weights_of_the_residual_way():
    site = summarise_mixing(static_mudd(), EMBEDDING)[4]
    assert site.inputs == ["2.q", "2.k", "2.v", "2.r"]
    assert site.parts == ["X_0", "X_1", "X_2"]
    assert site.read_mean.tolist() == [[-1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]]
    norms = EMBEDDING[0]["embedding"].flatten(0, 1).norm(dim=-1).mean()
    assert site.part_norms[0] == pytest.approx(norms.item(), rel=1e-5)


def test_cosines_of_averages_with_the_embedding():
    model = OwnModel("denseformer", layers=3)
    last = find_connections(model)[-1]
    with torch.no_grad():
        last.alpha.zero_()
        last.alpha[0] = -1  # the last average is minus the embedding
    cosines = measure_cosines(model, EMBEDDING)
    assert cosines.depth_labels == ["X_0", "Y_1", "Y_2", "Y_3"]
    assert cosines.depths[[0, 3]].tolist() == pytest.approx([1, -1])
    plain = measure_cosines(OwnModel("prenorm", layers=3), EMBEDDING)
    torch.testing.assert_close(plain.depths[:3], cosines.depths[:3])


def test_quantiles_of_planted_cosines():
    """The first output outweighs the embedding, whose cosines with it are 0, 0.01 .. 1."""
    model = OwnModel("prenorm", layers=1)
    with torch.no_grad():
        model.stack.sublayers[0].y.zero_()[0] = 1e6
    embedding = torch.zeros(1, 101, 16)
    embedding[0, :, 0] = torch.arange(101) / 100
    embedding[0, :, 1] = (1 - embedding[0, :, 0].square()).sqrt()
    cosines = measure_cosines(model, [{"embedding": embedding}])
    assert cosines.embedding[1].tolist() == pytest.approx([0.05, 0.5, 0.95], abs=1e-5)


# Streams, activations and gates


def mgr_with_gates(beta: list[float]) -> nn.Module:
    """Independent gates of the same value at every layer, one for each stream."""
    model = OwnModel(f"mgr(streams={len(beta)}, gate='independent')")
    with torch.no_grad():
        for site in find_connections(model):
            if site.b is not None:
                site.b.copy_(torch.tensor(beta).logit())
    return model


def test_a_static_stream_of_mgr():
    distances = compare_depths(mgr_with_gates([1e-9, 0.5, 0.5]), EMBEDDING)
    assert distances.streams.shape == (3, 9, 9)
    assert [stream for stream in range(3) if distances.is_static(stream)] == [0]
    assert distances.streams[0].max() < 1e-3
    assert distances.streams[2, :2].isnan().all()  # appended by the second output
    assert distances.streams[2, 2:, 2:].isfinite().all()


def test_a_stream_is_static_by_its_distances_between_two_sites():
    between = 0.03 * (1 - torch.eye(2))
    distances = DepthDistances(["0.attn", "readout"], between, between[None], between, [True] * 2)
    assert not distances.is_static(0)


def test_distances_are_drawn_as_in_the_paper():
    distances = compare_depths(OwnModel("prenorm", layers=3), EMBEDDING)
    picture = axes()
    distance_panel(distances)(picture)
    shown = torch.tensor(picture.images[0].get_array().filled(math.nan))
    assert shown.shape == (3, 3)
    assert shown[1, 0] == distances.angular[0, 4]  # of block 0 and the second block after it
    assert shown[2, 2] == distances.angular[4, 6]  # the first block after, in the lowest row
    assert shown[1, 2].isnan()
    distances.angular[0, 4] = 0
    distance_panel(distances)(picture)
    assert not picture.images[-1].get_array().mask[1, 0], "a distance of zero is no gap"


@pytest.mark.parametrize(("smallest", "shown"), [(0.0, (0.0, 2.0)), (-0.5, (-2.0, 2.0))])
def test_a_colour_bar_has_the_colours_of_the_weights(smallest, shown):
    """White is zero with and without negative weights, so that pictures can be compared."""
    picture = axes()
    draw_matrix(picture, torch.tensor([[smallest, 1.0]]), ["row"], ["a", "b"], limit=2.0)
    assert picture.images[0].get_clim() == (-2.0, 2.0)
    _, bar = picture.figure.axes
    assert bar.get_ylim() == shown


def test_marks_and_labels_stand_at_their_columns():
    picture = axes()
    draw_matrix(picture, torch.ones(1, 3), ["row"], ["a", "b", "c"], marks=[1])
    assert [line.get_xdata().tolist() for line in picture.lines] == [[1]]
    picture = axes()
    label_ticks(picture.xaxis, [str(number) for number in range(41)], first=0.5)
    labels = [label.get_text() for label in picture.get_xticklabels()]
    assert labels == [str(number) for number in range(0, 41, 3)]
    assert picture.get_xticks().tolist() == [float(label) + 0.5 for label in labels]


def test_the_line_and_the_band_of_cosines():
    quantiles = torch.tensor([[0.1, 0.5, 0.7], [0.2, 0.4, 0.9]])
    cosines = CosineSimilarity(
        ["0.attn", "readout"], quantiles, quantiles, [], {}, [], torch.zeros(0)
    )
    picture = axes()
    draw_cosines(picture, [("model", cosines)], "embedding")
    assert picture.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.4])
    for place, ends in ((0, [0.1, 0.7]), (1, [0.2, 0.9])):
        vertices = picture.collections[0].get_paths()[0].vertices
        heights = [y for x, y in vertices if x == place]
        assert [min(heights), max(heights)] == pytest.approx(ends)


def test_heads_are_numbered_from_the_left():
    """Five heads of two tokens in three columns, with gaps of two."""
    patterns = torch.arange(20.0).view(5, 2, 2) / 20
    picture = axes()
    draw_pattern_gallery(picture, patterns)
    shown = torch.tensor(picture.images[0].get_array().filled(math.nan))
    corners = [(0, 0), (0, 4), (0, 8), (4, 0), (4, 4)]
    tiles = [shown[top : top + 2, left : left + 2] for top, left in corners]
    torch.testing.assert_close(torch.stack(tiles), patterns.double())
    assert shown.isfinite().sum() == patterns.numel()
    places = {text.get_text(): text.get_position() for text in picture.texts}
    assert places == {str(head): (left + 1, top + 1) for head, (top, left) in enumerate(corners)}


def test_boxes_stand_side_by_side():
    quartiles = torch.tensor([[0.0, 1, 2, 4, 5], [1, 2, 4, 5, 9]])
    picture = axes()
    draw_boxes(picture, ["a", "b"], [("one", quartiles), ("other", quartiles + 10)], "y")
    medians = [line for line in picture.lines if line.get_linewidth() == 2]
    middles = [(line.get_xdata().mean(), line.get_ydata()[0]) for line in medians]
    expected = [(-0.2, 2.0), (0.8, 4.0), (0.2, 12.0), (1.2, 14.0)]
    assert middles == [pytest.approx(middle) for middle in expected]
    boxes = [box.get_path().vertices[:, 1] for box in picture.patches]
    assert [(box.min(), box.max()) for box in boxes] == [(1, 4), (2, 5), (11, 14), (12, 15)]
    colours = [to_hex(box.get_facecolor()) for box in picture.patches]
    assert colours == [to_hex(line.get_color()) for line in medians]
    assert colours[0] == colours[1] != colours[2]
    legend = picture.get_legend()
    assert [to_hex(patch.get_facecolor()) for patch in legend.get_patches()] == colours[::2]


def test_bars_of_models_stand_in_the_order_of_the_legend():
    """A model may lack a label; a bar has its deviation where it is known."""
    one = PartAblation(3.0, ["0.attn", "1.attn"], [0.1, 0.2])
    other = PartAblation(3.0, ["1.attn"], [0.5])
    picture = axes()
    deviations = {"other": PartAblation(0.0, ["1.attn"], [0.05])}
    draw_ablation(picture, [("one", one), ("other", other)], deviations)
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in picture.patches]
    assert bars == [pytest.approx(bar) for bar in [(-0.2, 0.1), (0.8, 0.2), (1.2, 0.5)]]
    (deviation,) = picture.collections
    assert deviation.get_segments()[0][:, 1].tolist() == pytest.approx([0.45, 0.55])


def test_pruning_and_ranks_as_pictures():
    picture = axes()
    draw_pruning(picture, [("model", PruningCurve([0.0, 0.5], [0.0, math.log(2)]))])
    assert picture.lines[0].get_xydata().tolist() == [[0, 1], [50, pytest.approx(2)]]
    picture = axes()
    draw_singular_values(picture, [("model", torch.tensor([3.0, 1.0]))])
    assert picture.lines[0].get_xydata().tolist() == [[1, 3], [2, 1]]


def test_a_planted_massive_activation_stays_in_the_stream():
    model = OwnModel("prenorm")
    with torch.no_grad():
        model.stack.sublayers[3].y[5] = 1000
    sites = {site.writer: site for site in measure_scales(model, EMBEDDING)}
    assert list(sites)[:3] == ["embedding", "0.attn", "0.mlp"]
    assert max(sites["1.attn"].hidden_largest) < 20
    for writer in ("1.mlp", "2.attn", "2.mlp", "3.attn", "3.mlp"):
        assert sites[writer].hidden_largest == pytest.approx([1000] * 3, rel=0.02)
        assert sites[writer].written_largest[0] > 980
    assert sites["1.mlp"].output_largest == pytest.approx([1000] * 3)
    assert sites["2.attn"].output_largest[0] < 20  # its own output has none
    assert sites["1.mlp"].hidden_rms == pytest.approx(1000 / 4, rel=0.02)  # of 16 channels


def test_largest_of_each_stream_is_after_the_write():
    model = mgr_with_gates([0.5, 0.01])
    with torch.no_grad():
        model.stack.sublayers[3].y[5] = -1000
    sites = {site.writer: site for site in measure_scales(model, EMBEDDING)}
    assert sites["1.mlp"].written_largest.tolist() == pytest.approx([500, 10], rel=0.2)
    assert sites["1.attn"].written_largest.max() < 20


def test_planted_gates():
    gates = [site.gate for site in measure_scales(mgr_with_gates([0.055, 0.815]), EMBEDDING)]
    assert [gate.writer for gate in gates if gate] == [
        "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp", "3.attn", "3.mlp"
    ]  # fmt: skip
    gate = gates[4]
    assert gate.mean == pytest.approx(0.435)
    assert gate.below_tenth == 0.5
    assert gate.quartiles[4] == pytest.approx(0.815)
    assert gate.edges[[0, -1]].tolist() == [0, 1]
    assert gate.counts.nonzero().flatten().tolist() == [5, 81]

    # One gate of six tokens is far from the others: an outlier beyond the whiskers.
    model = mgr_with_gates([0.04])
    site = find_connections(model)[4]
    with torch.no_grad():
        site.w1[0] = 100
    one_far = torch.zeros(1, 6, 16)
    one_far[..., 1] = 1
    one_far[0, 3, 0] = 1
    for sublayer in model.stack.sublayers:
        nn.init.zeros_(sublayer.y)
    gate = measure_scales(model, [{"embedding": one_far}])[5].gate
    assert gate.quartiles[4] > 0.9
    assert gate.whiskers == pytest.approx((0.04, 0.04))
    picture = axes()
    draw_gate_boxes(picture, [gate])
    markers = [line for line in picture.lines if line.get_marker() == "o"]
    assert markers[0].get_ydata().tolist() == [gate.quartiles[4]]
    gate.quartiles[0] = 0.01  # an outlier that is not drawn
    picture = axes()
    draw_gate_boxes(picture, [gate])
    drawn = [y for line in picture.lines if line.get_marker() != "o" for y in line.get_ydata()]
    assert (min(drawn), max(drawn)) == gate.whiskers
    box = picture.lines[0].get_xdata()
    assert picture.get_xticks().tolist() == pytest.approx([(min(box) + max(box)) / 2])

    smaller = replace(gate, mean=0.01, counts=gate.counts.flip(0), quartiles=torch.zeros(5))
    picture = axes()
    draw_gate_histogram(picture, [gate, smaller])
    counts = gate.counts + smaller.counts
    (steps,) = picture.patches
    assert steps.get_data().values.tolist() == pytest.approx((100 * counts / counts.sum()).tolist())
    mean = (gate.mean + 0.01) / 2
    assert picture.lines[0].get_xdata()[0] == pytest.approx(mean)
    labels = [text.get_text() for text in picture.get_legend().get_texts()]
    assert labels[0] == f"mean {mean:.3f}" and labels[-1] == f"maximum {gate.quartiles[4]:.3f}"


def saturated_gates(model) -> list[str]:
    alarms = find_alarms(measure_scales(model, EMBEDDING), summarise_mixing(model, EMBEDDING))
    return [str(alarm) for alarm in alarms if "saturated gate" in alarm.label]


@pytest.mark.parametrize(("beta", "alarms"), [(0.001, 8), (0.5, 0), (0.999, 8)])
def test_a_gate_near_0_or_1_is_saturated(beta, alarms):
    """An alarm for each of 8 outputs."""
    found = saturated_gates(mgr_with_gates([beta]))
    assert len(found) == alarms
    if found:
        assert found[0] == f"saturated gate: beta of 0.attn's output, mean {beta:.4f}"


def test_a_gate_of_1_is_saturated_only_at_a_limit():
    """Weights of 1 are where other methods begin: β of hyper has no limits, post of mHC 0 and 2."""
    for spec in ("hyper", "mhc", "mhc_lite", "altup", "skip_gain", "frac"):
        assert not saturated_gates(OwnModel(spec)), spec
    model = OwnModel("mhc(streams=2)")
    site = find_connections(model)[3]
    with torch.no_grad():
        site.base[2:4] = 20
    assert saturated_gates(model) == ["saturated gate: post of 1.mlp's output, mean 2.0000"]
    with torch.no_grad():  # 0.015 from the limit is less than a hundredth of the interval
        site.base[2:4] = math.log(1.985 / 0.015)
    assert saturated_gates(model) == ["saturated gate: post of 1.mlp's output, mean 1.9850"]


def test_a_sample_of_many_tokens_is_even():
    sample = TokenSample(limit=1000)
    for values in torch.arange(10_000.0).split(37):
        sample.add(values)
    kept = sample.values
    assert 500 < len(kept) <= 1000
    assert len(kept.diff().unique()) == 1
    assert kept.median().item() == pytest.approx(5000, rel=0.01)


def hidden_before_the_write(visit: SiteVisit) -> torch.Tensor:
    return visit.parts[:, 0]


def output_for_all_streams(visit: SiteVisit) -> torch.Tensor:
    return visit.parts[:, -1:].expand(-1, visit.weights.write.shape[-3], -1)


@pytest.mark.parametrize(
    ("attribute", "bug", "test"),
    [
        ("hidden", hidden_before_the_write, test_a_planted_massive_activation_stays_in_the_stream),
        ("written", output_for_all_streams, test_a_static_stream_of_mgr),
    ],
)
def test_a_planted_bug_is_seen(monkeypatch, attribute, bug, test):
    monkeypatch.setattr(SiteVisit, attribute, property(bug))
    with pytest.raises(AssertionError):
        test()
