"""The evidence pages: what is committed is what its results give, and planted results."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy.interpolate import CubicSpline

from benchmarks.evidence import figures, pages, studies
from benchmarks.evidence.claims import judge_claim, read_claims, sum_losses, unpaired_difference
from benchmarks.evidence.figures import VERDICT_MARKS, study_figures
from benchmarks.evidence.holm import p_value, remaining_after_holm
from benchmarks.evidence.overview import overview_figure
from benchmarks.evidence.pruning import read_pruned_models, take_over_pruning
from benchmarks.evidence.rates import HIGHEST_SHOWN, rate_figure, rate_table
from benchmarks.evidence.size_tables import multiplier_table
from benchmarks.evidence.studies import (
    RECIPE,
    read_parts,
    read_plans,
    read_recipe,
    read_studies,
    take_over,
)
from benchmarks.evidence.summary import TIMES, connection_tables
from benchmarks.evidence.tables import (
    arm_cells,
    claims_table,
    difference_to_baseline,
    judge_difference,
)
from crosslayer.inspect.inspection import PRUNED_SHARES
from crosslayer.intervals import Interval, MeanEstimate, mean_interval
from crosslayer.number_texts import format_interval
from crosslayer.train import rate_search
from crosslayer.train.compare import Comparison, prepare_comparison
from crosslayer.train.recipe import load_recipe
from tests.benchmarks.planted import write_results, write_speeds

ARMS = [arm.name for arm in read_recipe().arms]
MAIN = ["prenorm", "mudd", "hyper"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The short study from two comparisons, with pre-norm in the first alone, and a smaller one."""
    folder = tmp_path_factory.mktemp("planted")
    for name, arms, seeds in (("main", MAIN, 5), ("rest", ["postnorm", "one-way MUDD"], 3)):
        take_over(write_results(folder / name, arms, seeds), folder / "docs")
    unscaled = {"family": "llama", "model_config": {}, "lr": 2e-3}
    take_over(
        write_results(folder / "embeddings × 1", ["prenorm", "mudd"], **unscaled),
        folder / "docs",
    )
    smaller = {"layers": 6, "dim": 96, "steps": 140}
    take_over(write_results(folder / "small", MAIN, shift=0.3, **smaller), folder / "docs")
    write_speeds(folder / "arms.csv", {"prenorm": [1], "mudd": [0.8], "postnorm": [0.5, 0.4, 0.25]})
    return read_studies(folder / "docs", folder / "arms.csv")


def test_a_study_is_known_by_its_validation_sets(tmp_path):
    """Of two plans that differ in their text alone. Where the text lies does not matter."""
    sizes = {"layers": 6, "dim": 96, "steps": 140, "lr": 8e-3, "warmup": 0.3}
    novels = {"data": "elsewhere.jsonl", "valid": {"novels": "elsewhere-valid.jsonl"}}
    of_novels = write_results(tmp_path / "a", ["prenorm"], 1, **sizes, **novels)
    assert take_over(of_novels, tmp_path / "docs").name == "warm-small-novels.a.json"
    of_wikitext = write_results(tmp_path / "b", ["prenorm"], 1, **sizes)
    assert take_over(of_wikitext, tmp_path / "docs").name == "warm-small.b.json"


def table_row(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_committed_is_what_its_results_give():
    found = read_studies()
    for file, text in pages.page_texts(found).items():
        assert file.read_text("utf8") == text, "run python -m benchmarks.evidence"
    assert (studies.RESULTS / "connections.json").read_text("utf8") == pages.connections_text(found)
    drawn = {name: figure.digest for name, figure in pages.page_figures(found).items()}
    committed = {file.name: file.read_text("utf8") for file in studies.RESULTS.glob("*.svg")}
    assert committed.keys() == drawn.keys(), "run python -m benchmarks.evidence"
    assert all(digest in committed[name] for name, digest in drawn.items())


def test_an_arm_is_not_compared_before_the_search_of_its_rate_has_ended(planted):
    short = planted["short"]
    results = short.comparison.results
    runs = [run for run in results.runs if run.arm != "mudd at 4 × lr"]
    comparison = Comparison.from_results(replace(results, runs=runs), Path())
    unfinished = replace(short, comparison=comparison)
    for study, rate, verdict in ((short, "0.008", "better"), (unfinished, "0.008 so far", "–")):
        cells = arm_cells(study, "mudd")
        assert (cells["rate"], cells["verdict"]) == (rate, verdict)
        (lines, *_) = (lines for _, lines in study_figures(study)["differences"].data)
        assert ("mudd" in [line.label for line in lines]) == (verdict == "better")
    assert sum_losses({"short": unfinished}, {"mudd": 1, "prenorm": -1}) is None


def test_an_arm_is_not_compared_where_its_search_ended_at_its_limit(planted, monkeypatch):
    monkeypatch.setattr(rate_search, "RATE_FACTORS", (0.5, 1.0, 2.0))
    cells = arm_cells(planted["short"], "mudd")
    assert (cells["rate"], cells["verdict"]) == ("0.008 so far", "–")


def test_the_picture_of_all_settings(planted):
    rows = {row.settings: row.differences for row in overview_figure(planted).data}
    assert list(rows) == [
        ("6", "96", "0.29M", "0.11", "0.1", "× 50", "wikitext-2"),
        ("8", "128", "0.52M", "0.2", "0.1", "× 50", "wikitext-2"),
        ("8", "128", "0.52M", "0.2", "0.1", "× 1", "wikitext-2"),
    ]
    smaller, short, _ = rows.values()
    assert abs(short["mudd"].mean + 0.2) < 0.02
    assert smaller["mudd"] is not None and smaller["one-way MUDD"] is None
    assert short["denseformer"] is None


def draw_panel(draw):
    axes = Figure().subplots()
    draw(axes)
    return axes


def test_a_cell_of_the_picture_of_all_settings(planted):
    """A number below its arm's name, on a colour that is as strong as the difference is large."""
    figure = overview_figure(planted)
    ((_, draw),) = figure.panels
    axes = draw_panel(draw)
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first row is the highest"
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    centres = {text: x for (x, y), text in texts.items() if y < 0}
    fills = {}
    for drawn in axes.collections:
        if not isinstance(drawn, LineCollection):
            (path,) = drawn.get_paths()
            fills[tuple(path.get_extents().extents.tolist())] = drawn
    opacities = {}
    for height, row in enumerate(figure.data):
        assert [texts[centres[name], height + 0.5] for name in ("width", "text")] == [
            row.settings[1],
            row.settings[-1],
        ]
        for arm, found in row.differences.items():
            number = texts.get((centres[arm], height + 0.5))
            assert number == (None if found is None else f"{found.mean:+.2f}")
            left = centres[arm] - 0.5
            fill = fills.pop((left, height, left + 1, height + 1), None)
            verdict = "not run" if found is None else judge_difference(found)
            assert (fill is not None) == (verdict in ("better", "worse"))
            if fill is not None:
                assert to_hex(fill.get_facecolor()[0]) == VERDICT_MARKS[verdict][0].lower()
                opacities[round(found.mean, 1)] = fill.get_alpha()
    assert not fills
    # 0.2 is four fifths of the difference from which on all have one colour, and 0.3 is more
    assert opacities == pytest.approx({-0.2: 0.6, -0.1: 0.3, 0.3: 0.75}, abs=0.03)


def test_the_picture_of_intervals(planted):
    """Each is beside its arm's name, with the mark of its verdict."""
    figure = study_figures(planted["short"])["intervals"]
    ((_, draw),) = figure.panels
    axes = draw_panel(draw)
    names = [text.get_text() for text in axes.get_yticklabels()]
    drawn = {}
    for container in axes.containers:
        means, _, (lines,) = container.lines
        verdict = container.get_label()
        assert to_hex(means.get_color()) == VERDICT_MARKS[verdict][0].lower()
        for (mean, place), line in zip(means.get_xydata(), lines.get_segments(), strict=True):
            drawn[names[int(place)]] = verdict, [mean, *line[:, 0]]
    assert len(drawn) == len(figure.data) == 4
    for name, found in figure.data:
        assert drawn[name] == (judge_difference(found), pytest.approx(list(found)))
    assert names[-1] == "mudd", "the best is the highest"
    assert axes.get_ylim()[0] < 0 and axes.get_ylim()[1] > len(names) - 1


def test_large_differences_at_the_beginning_are_cut_off(planted, monkeypatch):
    _, (_, draw) = study_figures(planted["short"])["differences"].panels
    bottom, top = draw_panel(draw).get_ylim()
    assert -1 < bottom < -0.2 and 0 < top < 0.1
    monkeypatch.setattr(figures, "MOST_SHOWN", 0.005)
    assert draw_panel(draw).get_ylim() == (-0.005, 0.005)


def test_the_last_panel_has_the_legend_of_all(planted):
    for name in ("curves", "differences"):
        panels = study_figures(planted["short"])[name].panels
        legends = [draw_panel(draw).get_legend() for _, draw in panels]
        assert [legend is not None for legend in legends] == [False, True]


def test_arms_of_one_model_share_a_speed(planted):
    assert planted["short"].speeds.keys() == {"eager", "compiled"}
    for speeds in planted["short"].speeds.values():
        assert speeds["mudd rate 0.1"] == speeds["mudd"]
        assert "prenorm deeper" not in speeds and "one-way MUDD" not in speeds


def test_a_variant_that_has_not_been_measured_for_all_arms_has_no_speeds(tmp_path):
    write_speeds(tmp_path / "arms.csv", {"prenorm": [1], "mudd": [0.8]})
    lines = (tmp_path / "arms.csv").read_text().splitlines()
    (tmp_path / "arms.csv").write_text("\n".join(lines[:-1]) + "\n")  # without MUDD, compiled
    take_over(write_results(tmp_path / "run", MAIN), tmp_path / "docs")
    study = read_studies(tmp_path / "docs", tmp_path / "arms.csv")["short"]
    assert study.speeds.keys() == {"eager"} and study.equal_time("compiled") is None


def test_a_size_of_two_seeds_or_an_open_search_has_no_multiplier(planted):
    (part,) = (part for part in read_parts() if part.title == "Size, with tokens in proportion")
    small = planted["size-small"]
    assert multiplier_table(part, planted).count("×") > 2
    for is_kept in (lambda run: run.arm != "prenorm at 4 × lr", lambda run: run.seed < 2):
        runs = [run for run in small.comparison.results.runs if is_kept(run)]
        results = replace(small.comparison.results, runs=runs)
        unfinished = replace(small, comparison=Comparison.from_results(results, Path()))
        found = multiplier_table(part, {**planted, small.plan.name: unfinished})
        assert found == "", "one size alone has no power law"


def test_tables_of_planted_results(planted):
    tokens_of_all = 256 * 8 * 256 * len(planted["short"].comparison.results.runs)
    sections = pages.evidence_sections(planted)
    main = sections["The connections"]
    losses, costs, compiled = main.split("| arm | training |")
    mudd, hyper = (table_row(losses, arm) for arm in ("mudd", "hyper"))
    assert mudd[2] == "0.008" and mudd[7] == "better"
    difference, low, high = map(float, re.findall(r"[-+][\d.]+", mudd[6]))
    assert low < difference < high < 0 and abs(difference + 0.2) < 0.02
    cost = table_row(costs, "mudd")
    # one fifth is missing when pre-norm ends: 0.5 · (1 − 0.8) above its own end
    assert float(cost[4].split()[0]) == pytest.approx(float(mudd[5].split()[0]) + 0.1, abs=1e-4)
    assert hyper[7] == "cannot tell" and table_row(costs, "hyper")[1] == "not run yet"
    # each seed by its own measurement of the speed
    assert table_row(costs, "postnorm")[1] == "0.38 ± 0.13"
    study = planted["short"]
    at_equal_time, at_end = study.losses("postnorm", "equal time"), study.losses("postnorm")
    missing = [at_equal_time[seed] - at_end[seed] for seed in range(3)]
    assert missing == pytest.approx([0.25, 0.3, 0.375])
    early = study.losses("postnorm", "an eighth of the steps")
    assert [early[seed] - at_end[seed] for seed in range(3)] == pytest.approx([0.4375] * 3)
    # compiled, a tenth is missing
    assert table_row(compiled, "mudd")[1] == "0.90"
    early = float(table_row(compiled, "mudd")[4].split()[0])
    assert early == pytest.approx(float(mudd[5].split()[0]) + 0.05, abs=1e-4)
    assert re.search(r"^Not run yet: .*\baltup\b", compiled, re.M)
    assert table_row(main, "postnorm")[7] == "worse"
    assert f"{tokens_of_all / 3000 / 3600:.1f} hours of training on" in main
    assert "With Holm's correction for the 4 arms that have an interval" in main
    assert "crosslayer compare" in sections["Four times the tokens"]
    size, multipliers = sections["Size, with tokens in proportion"].split("```sh")
    columns = table_row(size, "arm")
    assert columns == ["arm", "6 layers, width 96, 140 steps", "8 layers, width 128, 256 steps"]
    assert table_row(size, "mudd")[2] == f"{mudd[5]} at {mudd[2]}<br>{mudd[6]}"
    assert table_row(size, "mgr")[2] == "not run yet"
    assert "Not run yet: 10 layers, width 160, 433 steps." in size
    assert sections["Depth, at one width"].startswith("Not run yet.")
    # without a study of its own, a part does not show those of other parts
    assert sections["The embeddings"].startswith("Not run yet.")
    claim = table_row(sections["Claims"], "Four ways of MUDD beat one, dynamic")
    assert claim[5].startswith("agrees: -0.") and claim[6] == "not run yet"
    summary = pages.summary_sections(planted)["In short"]
    with_unscaled = table_row(summary, "`mudd`")[4]
    assert float(with_unscaled.strip("*").split()[0]) == pytest.approx(-0.2, abs=0.02)
    assert with_unscaled.startswith("**"), "the interval excludes zero"
    assert table_row(summary, "`hyper`")[4] == "–"
    value, low, _ = map(float, re.findall(r"[\d.]+", table_row(multipliers, "mudd")[1]))
    assert 1 < low < value < 2  # 0.2 of 0.3 nats, over 1.8 times the compute
    assert table_row(multipliers, "prenorm")[1].startswith("1.00 ×"), "two sizes fit any law"
    rows = connection_tables(planted, ["mudd", "highway"])
    assert table_row(rows["mudd"], "arm")[4] == f"0.2 tokens, {TIMES}50"
    assert table_row(rows["mudd"], "one-way MUDD")[4].startswith(("-", "**-"))
    assert rows["highway"] == ""
    figures = study_figures(planted["short"])
    assert all(b"</svg>" in figure.render() for figure in figures.values())
    data = dict(figures["differences"].data)
    lines = data["training time, compiled (pre-norm's run = 1)"]
    by_time = {line.label: line for line in lines}
    assert by_time["mudd"].x[-1] == 1 and by_time["mudd"].y[-1] == pytest.approx(-0.15, abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.0014, -0.0001, "equal"),
        (-0.004, 0.0099, "equal"),
        (-0.0101, -0.001, "better"),
        (0.001, 0.0101, "worse"),
        (-0.0101, 0.001, "cannot tell"),
        (float("nan"), float("nan"), "cannot tell"),
    ],
)
def test_a_difference_counts_from_a_least_size_on(low, high, verdict):
    assert judge_difference(Interval(0.0, low, high)) == verdict


def test_the_smallest_model_against_pre_norms_better_rate():
    """What the page says of 0.008, which is not the rate that seed 0 chose for pre-norm."""
    study = read_studies()["tokens-20-tiny"]
    (prenorm,) = [arm for arm in study.comparison.recipe.arms if arm.name == "prenorm"]
    assert study.comparison.at_best_rate(prenorm).name == "prenorm at 0.5 × lr"
    at_given_rate = study.comparison.losses_by_rate(prenorm)[1.0]
    not_better = set()
    for name in study.arms:
        runs = study.runs(name).values()
        found = mean_interval([run.valid_loss - at_given_rate[run.seed] for run in runs])
        if found.sign >= 0:
            not_better.add(name)
    assert not_better == {"prenorm", "attnres"}


def test_larger_embeddings_on_the_seeds_that_both_have():
    """What the page says of x 50 against x 1 at twenty tokens a parameter."""
    found = read_studies()
    plain, scaled = found["tokens-20"], found["tokens-20-scaled"]

    def difference(name):
        pairs = zip(plain.losses(name).values(), scaled.losses(name).values(), strict=False)
        return [round(value, 3) for value in mean_interval([b - a for a, b in pairs])]

    for name in ("prenorm", "mudd", "resi_dual", "hyper"):
        assert list(plain.losses(name)) == list(scaled.losses(name))[:3] == [0, 1, 2]
    assert difference("prenorm") == [-0.001, -0.058, 0.056]
    assert difference("mudd") == [0.026, 0.005, 0.048]
    assert difference("resi_dual") == [0.024, 0.008, 0.040]
    assert difference("hyper")[0] == 0.001
    assert all(difference(name)[2] > 0 for name in ("mgr", "mhc", "denseformer"))


def test_24_narrow_layers_are_told_by_pairs_alone():
    study = read_studies()["narrow-24-warm"]
    mgr, hyper, prenorm = (study.losses(name) for name in ("mgr", "hyper", "prenorm"))
    assert [round(mgr[seed] - prenorm[seed], 3) for seed in range(3)] == [-0.015, -0.014, -0.015]
    spreads = [round(max(x.values()) - min(x.values()), 3) for x in (mgr, prenorm)]
    assert spreads == [0.016, 0.017]
    unpaired = [
        unpaired_difference(list(losses.values()), list(prenorm.values())).interval
        for losses in (mgr, hyper)
    ]
    assert unpaired[0] == pytest.approx((-0.014, -0.039, 0.010), abs=5e-4)
    assert unpaired[1] == pytest.approx((0.013, -0.007, 0.034), abs=5e-4)


def test_48_layers_at_half_of_the_rate():
    """What the page says of 0.008, and of the seed that does not recover at 0.016."""
    study = read_studies()["narrow-48-warm"]
    arms = {arm.name: arm for arm in study.comparison.recipe.arms}
    prenorm, hyper = (study.comparison.losses_by_rate(arms[name])[1.0] for name in MAIN[::2])
    mgr, at_chosen_rate = study.losses("mgr"), study.losses("prenorm")

    def difference(losses, baseline):
        found = mean_interval([losses[seed] - baseline[seed] for seed in range(3)])
        return [round(value, 3) for value in found]

    assert round(sum(prenorm.values()) / 3, 3) == 4.561
    assert difference(hyper, prenorm) == [0.015, -0.005, 0.035]
    assert difference(mgr, prenorm) == [-0.048, -0.063, -0.032]
    curve = [round(loss, 2) for _, loss in study.runs("hyper")[1].curve]
    assert [curve[2], curve[4], curve[7]] == [5.11, 6.97, 6.53]
    gains = [study.losses("hyper")[seed] - at_chosen_rate[seed] for seed in (0, 2)]
    assert [round(gain, 3) for gain in gains] == [0.017, -0.002]


@pytest.mark.slow
def test_verdicts_at_equal_time_by_a_spline(monkeypatch):
    """What the page says of lines between the points of a curve."""

    def differences():
        return {
            (study, at, name): difference_to_baseline(found[study], name, at)
            for study in ("tokens-20", "unscaled-short", "unscaled-long", "short", "long")
            for at in studies.TIMED_VARIANTS
            for name in found[study].arms
        }

    def spline(costs, losses, cost):
        return float(CubicSpline(costs, losses)(cost))

    found = read_studies()
    by_lines = {key: x for key, x in differences().items() if x is not None}
    monkeypatch.setattr(studies, "loss_at_cost", spline)
    by_spline = differences()
    gains = [x.mean - by_spline[key].mean for key, x in by_lines.items()]
    assert 0.0055 < max(gains) < 0.0065
    changed = {key for key, x in by_lines.items() if x.sign != by_spline[key].sign}
    assert changed == {
        ("tokens-20", "equal time", "resi_dual"),
        ("tokens-20", "equal time", "altup"),
        ("short", "equal time", "mudd"),
        ("short", "equal time", "highway"),
    }
    better = by_spline["tokens-20", "equal time", "resi_dual"]
    assert better == pytest.approx((-0.033, -0.065, -0.001), abs=5e-4)


def test_unpaired_difference():
    estimate = unpaired_difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0, 8.0])
    # 1/3 + 5/3 of variance, and 4 / (1/18 + 25/27) = 4.08 degrees of freedom, so the quantile of 4
    assert estimate == pytest.approx((-3.0, math.sqrt(2), 4 / (1 / 18 + 25 / 27)))
    reach = 2.776445 * math.sqrt(2)
    assert estimate.interval == pytest.approx((-3.0, -3 - reach, -3 + reach), abs=1e-4)
    assert unpaired_difference([1.0, 1.0], [2.0, 2.0]).interval == (-1, -1, -1)
    single = unpaired_difference([1.0], [2.0, 4.0]).interval
    assert single.mean == -2 and math.isnan(single.low) and math.isnan(single.high)


def test_p_value():
    """On the quantiles of a printed table of Student's t."""
    assert p_value(MeanEstimate(-2.776445, 1.0, 4)) == pytest.approx(0.05, abs=1e-6)
    assert p_value(MeanEstimate(0.5 * 4.604095, 0.5, 4)) == pytest.approx(0.01, abs=1e-6)
    assert [p_value(MeanEstimate(mean, 0.0, 4)) for mean in (0.0, 1.0)] == [1, 0]


def test_holms_correction_stops_at_the_first_that_fails():
    # p-values 0.001, 0.012, 0.03 and 0.04, against 0.05 / 4, / 3, / 2 and / 1
    quantiles = {"b": -3.2905, "e": 2.1701, "f": 2.0537, "d": -2.5121}
    means = {name: MeanEstimate(quantile, 1.0, 1e9) for name, quantile in quantiles.items()}
    remaining, tested = remaining_after_holm(means | {"g": None, "h": MeanEstimate(9, math.nan, 0)})
    assert (list(remaining), tested) == (["b", "d"], 4)
    assert remaining_after_holm({}) == ({}, 0)


def test_pre_norm_with_more_seeds_is_compared_whole(tmp_path):
    """Its further seeds are higher by 0.02 each, so pairs of the same seed would differ by less."""
    docs = tmp_path / "docs"
    smaller = {"layers": 6, "dim": 96, "steps": 140, "lr": 8e-3, "warmup": 0.3}
    for name, arms, seeds in (("a", ["prenorm"], 10), ("b", ["mudd", "hyper"], 5)):
        take_over(write_results(tmp_path / name, arms, seeds, **smaller), docs)
    found = read_studies(docs, tmp_path / "no speeds")
    study = found["warm-small"]
    of_baseline, of_mudd = (list(study.losses(name).values()) for name in ("prenorm", "mudd"))
    expected = unpaired_difference(of_mudd, of_baseline).interval
    assert expected.mean == pytest.approx(-0.25, abs=0.01), "means of seeds 0 to 4 and 0 to 9"
    section = pages.evidence_sections(found | {"short": study})[
        "A smaller model with a longer warm-up"
    ]
    assert table_row(section, "mudd")[6] == format_interval(expected)
    assert "Differences are to all 10 seeds of prenorm, without pairing" in section
    weights = {"warm-small/mudd": 2, "warm-small/hyper": -1, "warm-small/prenorm": -1}
    hyper = list(study.losses("hyper").values())
    paired = [2 * one - other for one, other in zip(of_mudd, hyper, strict=True)]
    assert sum_losses(found, weights) == unpaired_difference(paired, of_baseline)
    (lines,) = (lines for _, lines in study_figures(study)["differences"].data)
    (mudd,) = [line for line in lines if line.label == "mudd"]
    assert (mudd.y[-1], mudd.low[-1], mudd.high[-1]) == pytest.approx(expected)


def test_claims_without_a_result_are_in_a_list(planted):
    """A claim whose study is not planned with embeddings × 1 is not called missing there."""
    experts = "The gain of MUDD is larger with experts"
    table, missing = claims_table(planted).rsplit("\n\n", 1)
    assert missing.startswith("Not run yet: ") and "; Re-allocation helps MUDD;" in missing
    assert experts in missing and experts not in table
    table, missing = claims_table(planted | {"moe": planted["short"]}).rsplit("\n\n", 1)
    assert table_row(table, experts)[5].startswith("cannot tell")
    assert table_row(table, experts)[6] == "–" and experts not in missing


def test_claims_of_planted_results(planted):
    verdicts = {claim.claim: judge_claim(claim, planted)[1] for claim in read_claims()}
    assert verdicts["Four ways of MUDD beat one, dynamic"] == "agrees"
    assert verdicts["Hyper-connections beat pre-norm"] == "cannot tell"
    assert verdicts["Re-allocation helps MUDD"] == "not run yet"
    assert verdicts["The gain of MUDD is larger with experts"] == "not run yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(planted, "moe", planted["short"])
        (claim,) = [claim for claim in read_claims() if "experts" in claim.claim]
        interval, verdict = judge_claim(claim, planted)
        assert interval.mean == pytest.approx(0) and verdict == "cannot tell"


def test_claims_name_arms_and_their_weights_balance():
    known = set(ARMS)
    for part in read_parts():
        known |= {f"{plan.name}/{arm}" for plan in part.plans for arm in plan.arms}
    known |= {f"pruning/{share:.0%}".replace("%", " %") for share in PRUNED_SHARES}
    for claim in read_claims():
        assert set(claim.sum) <= known, claim.claim
        assert sum(claim.sum.values()) == 0 and bool(claim.sum) != bool(claim.needs)


def test_a_share_of_a_gain_that_no_paper_states_is_said_to_be_ours():
    for claim in read_claims():
        if any(weight % 1 for weight in claim.sum.values()):
            assert "ours" in claim.source, claim.claim


def test_pruned_models_of_an_inspection(tmp_path, planted):
    """Of two seeds, which lose 0.1 and 0.2 nats without 15 % of the weights."""
    models = [
        {"name": f"seed {seed}", "results": {"pruning": {"shares": [0, 0.15], "losses": losses}}}
        for seed, losses in enumerate(([5.0, 5.1], [5.2, 5.4]))
    ]
    folder = tmp_path / "inspection"
    folder.mkdir()
    file = folder / "inspection.json"
    file.write_text(json.dumps({"models": models}))
    take_over_pruning(folder, tmp_path)
    studies = {**planted, "pruning": read_pruned_models(tmp_path)}
    values = sum_losses(studies, {"pruning/15 %": 1, "pruning/0 %": -1}).interval
    assert values == pytest.approx(mean_interval([0.1, 0.2]))
    models[0]["results"] = {}
    file.write_text(json.dumps({"models": models}))
    with pytest.raises(ValueError, match="seed 0 has no losses of pruning"):
        take_over_pruning(folder, tmp_path)


def test_other_settings_are_no_study(tmp_path):
    folder = write_results(tmp_path / "other", MAIN, context=64)
    with pytest.raises(ValueError, match="context = 64"):
        take_over(folder, tmp_path / "docs")


def _change_environment(file: Path, **values: str) -> None:
    content = json.loads(file.read_text())
    content["environment"] |= values
    file.write_text(json.dumps(content))


def test_files_of_a_study_must_fit(tmp_path):
    docs = tmp_path / "docs"
    first = take_over(write_results(tmp_path / "one", MAIN), docs)
    assert "someone" not in first.read_text()
    folder = write_results(tmp_path / "two", ["mgr"])
    _change_environment(folder / "results.json", device="another device")
    take_over(folder, docs)
    (study,) = read_studies(docs, tmp_path / "none.csv").values()
    environment = study.comparison.results.environment
    assert environment["device"] == "CPU, 1 threads and another device"
    assert environment["torch"] == "2.13.0"

    (docs / "short.two.json").unlink()
    take_over(write_results(tmp_path / "two", ["mudd", "mgr"]), docs)
    with pytest.raises(ValueError, match="both have 'mudd"):
        read_studies(docs, tmp_path / "none.csv")
    file = docs / "short.two.json"
    content = json.loads(file.read_text())
    content["data"]["sha256"] = "1"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="other settings or data"):
        read_studies(docs, tmp_path / "none.csv")


@pytest.mark.slow
def test_every_planned_study_starts(tmp_path):
    """Its options are known, and all its arms can be built."""
    text, valid = tmp_path / "text.txt", tmp_path / "valid.txt"
    for file in (text, valid):
        file.write_text("the quick brown fox. " * 400)
    for plan in read_plans().values():
        data = {"data": str(text), "valid": {"text": str(valid)}, "tokenizer": "bytes"}
        recipe = load_recipe(RECIPE, **(plan.options | data))
        recipe.arms = [arm for arm in recipe.arms if arm.name in (plan.arms or ARMS)]
        folder = tmp_path / plan.name
        comparison = prepare_comparison(recipe, plan.seeds, folder, plan.search_rates)
        runs_an_arm = 1 if plan.search_rates else plan.seeds  # a search has a first trial
        assert len(comparison.missing_runs()) == len(plan.arms or ARMS) * runs_an_arm


def test_every_rate_and_warmup_is_in_one_table(tmp_path):
    """Planted: each arm is best at twice the rate, where it has three seeds, and elsewhere one."""
    docs = tmp_path / "docs"
    take_over(write_results(tmp_path / "a", MAIN), docs)
    take_over(write_results(tmp_path / "b", ["prenorm", "mudd"], layers=24), docs)
    longer = {"layers": 24, "lr": 8e-3, "warmup": 0.3}
    take_over(write_results(tmp_path / "c", ["prenorm"], **longer), docs)
    found = read_studies(docs, tmp_path / "no speeds")
    (part,) = [part for part in read_parts() if "rate picture" in part.shows]
    lines = rate_table(part, found).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    columns = rows[0]
    cells = {(row[0], row[1]): dict(zip(columns, row, strict=True)) for row in rows[2:]}
    arms = [("8", "prenorm"), ("8", "mudd"), ("8", "hyper"), ("24", "prenorm"), ("24", "mudd")]
    assert list(cells) == arms, "an arm without a run has no row"
    assert columns[2:6] == ["at 0.002", "at 0.004", "at 0.008", "at 0.016"]

    losses = {(run.arm, run.seed): run.valid_loss for run in found["short"].comparison.results.runs}
    best = [losses["mudd at 2 × lr", seed] for seed in range(3)]
    base = [losses["prenorm at 2 × lr", seed] for seed in range(3)]
    expected = mean_interval([loss - other for loss, other in zip(best, base, strict=True)])
    cell = cells["8", "mudd"]["at 0.008"]
    assert cell == f"{sum(best) / 3:.4f} (3)<br>{format_interval(expected)}"
    assert cells["8", "mudd"]["at 0.004"].startswith(f"{losses['mudd', 0]:.4f} (1)<br>")
    assert cells["8", "prenorm"]["at 0.008"] == f"{sum(base) / 3:.4f} (3)"

    warm = "at 0.016, warm-up 0.3"
    assert cells["24", "prenorm"][warm].endswith("(3)") and cells["8", "prenorm"][warm] == "–"
    figure = rate_figure(part, found)
    axes = draw_panel(dict(figure.panels)["24 layers"])
    assert axes.get_xscale() == "log" and axes.get_ylim()[1] == HIGHEST_SHOWN
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["0.002", "0.004", "0.008", "0.016"]
    shown = dict(figure.data)
    assert [line.label for line in shown[8]] == MAIN
    assert shown[24][0].x == [0.002, 0.004, 0.008, 0.016], "without the other warm-up"
    assert shown[8][1].low[2] == min(best) and shown[8][1].high[2] == max(best)
