"""Views of training, on curves whose answer is known."""

import json
import math

import numpy
import pytest

from crosslayer.inspect.training import (
    PowerLaw,
    cost_to_loss,
    estimate_multiplier,
    find_spikes,
    fit_power_law,
    loss_at_cost,
    read_training_curve,
    smooth_losses,
)


def test_a_run_s_metrics(tmp_path):
    rows = [
        {"step": 10, "loss": 4.0, "tokens_per_second": 100.0},
        {"step": 15, "held-out loss": 3.5, "news loss": 4.5},
        {"step": 20, "loss": 3.0, "tokens_per_second": 120.0},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 30, "lo')
    curve = read_training_curve(tmp_path)
    assert curve.steps == [10, 20]
    assert curve.losses == [4.0, 3.0]
    assert curve.valid == {"held-out": [(15, 3.5)], "news": [(15, 4.5)]}
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="line 1: has no step"):
        read_training_curve(tmp_path)
    with pytest.raises(ValueError, match="expected the folder of a run"):
        read_training_curve(tmp_path / "nothing")


def test_smoothing_is_unbiased_at_the_start():
    assert smooth_losses([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth_losses([1.0, 3.0], decay=0.5)[1] == pytest.approx((0.5 + 3) / 1.5)
    # 20 steps later, after two intervals of 10
    assert smooth_losses([1.0, 3.0], 0.5, [10, 30], 10)[1] == pytest.approx((0.25 + 3) / 1.25)


def test_planted_spikes():
    losses = [3 * math.exp(-t / 200) + 2 + 0.01 * math.sin(t) for t in range(400)]
    assert find_spikes(losses) == []
    losses[200:203] = [4.0, 5.0, 4.0]
    losses[300] = 3.5
    assert find_spikes(losses) == [200, 300]


def test_cost_to_an_equal_loss():
    steps, plain = [0, 10, 20, 30], [4.0, 3.0, 2.5, 2.0]
    better = [4.0, 2.0, 1.5, 1.0]
    assert cost_to_loss(steps, plain, 2.75) == 15
    assert cost_to_loss(steps, plain, 1.0) is None
    assert cost_to_loss(steps, better, plain[-1]) == 10
    assert (
        cost_to_loss(steps, [4.0, math.nan, 2.5, 2.0], 3.25) == 10
    )  # between the losses beside it
    assert cost_to_loss(steps[:2], [math.nan, 1.0], 2.0) == 10
    assert loss_at_cost(steps, plain, 15) == 2.75
    assert loss_at_cost(steps, plain, 31) is None


def test_power_law_and_multiplier_of_known_curves():
    sizes = [1e8, 3e8, 1e9]
    plain = [20 * size**-0.1 for size in sizes]
    law = fit_power_law(sizes, plain)
    assert (law.a, law.b) == pytest.approx((20, 0.1))
    assert law.error < 1e-12
    assert law.predict(1e9) == pytest.approx(plain[2])
    # a method that is as good as the baseline with 1.89 times the compute
    multiplier = estimate_multiplier(law, sizes, [20 * (1.89 * size) ** -0.1 for size in sizes])
    assert (multiplier.value, multiplier.low, multiplier.high) == pytest.approx([1.89] * 3)
    with pytest.raises(ValueError, match="does not fall with size"):
        estimate_multiplier(fit_power_law(sizes, plain[::-1]), sizes, plain)
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_power_law([1e8], [2.0])
    with pytest.raises(ValueError, match="must be positive"):
        fit_power_law([1e8, 2e8], [2.0, math.nan])


def test_a_size_far_from_those_of_a_law_is_known_less():
    """The variance of x is (σ/b)² (1/n + (x − x̄)² / Σ (x_i − x̄)²)."""
    law = PowerLaw(a=1.0, b=0.5, error=0.1, log_sizes=[0.0, 1.0, 2.0])
    place, variance = law.log_size_of(math.exp(-2))
    assert place == pytest.approx(4)
    assert variance == pytest.approx(0.04 * (1 / 3 + 9 / 2))


@pytest.mark.parametrize(("count", "seeds"), [(3, 5), (4, 1), (8, 1)])
def test_the_multiplier_s_interval_has_its_truth_in_95_of_100_studies_at_least(count, seeds):
    """Also where few points determine the baseline's law, and the method has many."""
    random = numpy.random.default_rng(0)
    sizes = numpy.array([1e8 * 2**power for power in range(count)])
    own_sizes = numpy.tile(sizes, seeds)
    inside = []
    for _ in range(600):
        plain = 20 * sizes**-0.1 * numpy.exp(random.normal(0, 0.004, count))
        better = 20 * (1.89 * own_sizes) ** -0.1
        better *= numpy.exp(random.normal(0, 0.004, len(better)))
        multiplier = estimate_multiplier(fit_power_law(sizes, plain), list(own_sizes), better)
        inside.append(multiplier.low < 1.89 < multiplier.high)
    assert 0.95 < sum(inside) / len(inside) < 0.995


def test_a_multiplier_of_too_few_points_has_no_interval():
    sizes, plain, better = [1e8, 2e8, 4e8], [3.0, 2.8, 2.6], [2.9, 2.7, 2.4]
    for baseline, points in ((2, 3), (3, 1)):
        law = fit_power_law(sizes[:baseline], plain[:baseline])
        multiplier = estimate_multiplier(law, sizes[:points], better[:points])
        assert multiplier.value > 1 and math.isnan(multiplier.low) and math.isnan(multiplier.high)
