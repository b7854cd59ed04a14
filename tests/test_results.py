"""Results: which runs count, the one statistic, and what tables, curves and the README show of them."""
import math
import re

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from scipy import stats

from tce_nb.report.paper import paper_numbers
from tce_nb.report.results import (
    Gain, accuracy_table, cell_table, curves, digits_comparison, epochs_to, gain, overfit_after_drop, readme_table,
    reported_runs, runs_like, scale_text, speed_points, speed_threshold, table_markdown, update_readme)
from tce_nb.run.config import Config, preset
from tce_nb.run.records import gather, histories

HERE = ROOT/"results"


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)  # the paper's numbers are found from here


def runs_of(method, *accuracies, scale="few", first=1, **column):
    "Runs that never were, with these accuracies in percent at both readings"
    whole = scale in ("paper", "cpu", "digits")
    usual = dict(vars(Config()), dataset="cifar10", eta=0.4, version="", classes=10, tested_on=10_000, diverged=None, epochs=128,
                 hold_out=0.0 if whole else 0.1, train_per_class=500, trained_on=4500, held_out=500, wrong_rate=0.36)
    return pd.DataFrame([dict(usual, scale=scale, **column) | dict(
        method=method, seed=seed, name=f"{method}-{scale}-{seed}-{column}", selected=accuracy / 100, last=accuracy / 100)
        for seed, accuracy in enumerate(accuracies, first)])


def both(scale="few", gain=3, **column):
    return pd.concat([runs_of("ce", 50, 52, 51, scale=scale, **column),
                      runs_of("tce:1.5", 50 + gain, 52.5 + gain, 51 + gain, scale=scale, **column)])


# the one statistic

def test_a_gain_is_scipys_paired_t_test():
    rng = np.random.default_rng(0)
    first, second = (pd.Series(50 + rng.normal(size=6)) for _ in range(2))
    test = stats.ttest_rel(first + 2, second).confidence_interval(0.95)
    found = gain(first + 2, second)
    assert found.n == 6 and (found.low, found.high) == pytest.approx((test.low, test.high))
    assert found.significant == (test.low > 0)


def test_a_gain_takes_common_seeds_only():
    first, second = runs_of("tce:1", 60, 70, 90, first=2), runs_of("ce", 10, 50, 62)
    found = gain(first, second)  # seeds 2 and 3
    assert found.n == 2 and found.points == pytest.approx(9)
    assert gain(first, runs_of("ce", 50)) is None
    assert gain(runs_of("tce:1", math.nan, 60), runs_of("ce", 50, 50)).n == 1


def test_one_seed_and_a_tie_have_no_interval():
    for found in (gain(runs_of("tce:1", 60), runs_of("ce", 50)), gain(runs_of("tce:1", 60, 61), runs_of("ce", 50, 51))):
        assert (found.low, found.high, found.significant) == (None, None, False)
        assert str(found) == "+10.0" and "interval" not in found.words


def test_two_runs_with_one_seed_are_refused():
    twice = pd.concat([runs_of("ce", 50), runs_of("tce:1", 51)])
    with pytest.raises(ValueError, match="several with one seed"): gain(twice, runs_of("ce", 50))


@pytest.mark.parametrize("found, text", [
    (Gain(3.21, 3, 1.04, 5.38), "+3.2 [+1.0, +5.4]"), (Gain(-0.213, 5, -0.25, -0.18), "−0.21 [−0.25, −0.18]"),
    (Gain(6.3, 3, -4.8, 17.4), "+6 [−5, +17]"), (Gain(-0.01), "+0.0")])
def test_a_gain_has_as_many_digits_as_its_interval_carries(found, text):
    assert str(found) == text and found.words.startswith(text.partition(" ")[0] + " points (")


def test_a_column_shows_the_first_scale_that_compares():
    short, cpu = both("short"), both("cpu")
    alone = runs_of("ce", 84, scale="paper")
    assert set(reported_runs(pd.concat([cpu, both(), short, alone])).scale) == {"short"}
    assert set(reported_runs(pd.concat([cpu, both()])).scale) == {"few"}
    assert set(reported_runs(pd.concat([cpu, runs_of("ce", 50)])).scale) == {"cpu"}
    assert set(reported_runs(pd.concat([cpu, both()]), scale="cpu").scale) == {"cpu"}
    assert len(reported_runs(alone)) == 1 and reported_runs(alone[:0]).empty


def test_columns_choose_for_themselves():
    frame = pd.concat([both(), both("cpu", eta=0.8), both("cpu", noise="pair_flip")])
    shown = reported_runs(frame)
    assert dict(zip(shown.eta, shown.scale)) == {0.4: "few", 0.8: "cpu"}
    assert len(reported_runs(frame, noise=None)) == 18 and len(reported_runs(frame, "cifar10", [0.8])) == 6
    assert reported_runs(frame, "mnist").empty and reported_runs(frame.assign(scale="custom")).empty


def test_hold_out_runs_count_at_few_and_full_runs_first_at_paper():
    full, held = both("paper"), both("paper").assign(hold_out=5000, name="held")
    assert reported_runs(pd.concat([held, full])).hold_out.eq(0).all()
    only = held.assign(seed=0).drop_duplicates("method")
    assert len(reported_runs(only)) == 2  # as long as there are no others
    assert len(reported_runs(pd.concat([only, runs_of("ce", 84, scale="paper")]))) == 2
    assert reported_runs(pd.concat([both().assign(hold_out=0.0, name="full"), both()])).hold_out.eq(0.1).all()
    assert reported_runs(both().assign(hold_out_noisy=False)).empty


def test_a_run_counts_once_and_one_version_is_shown():
    again = both()[:1].assign(name="again", device="cuda")
    other = both()[:2].assign(name="other", version="another split")
    assert len(reported_runs(pd.concat([both(), again, other]))) == 6


def test_runs_like_leaves_the_rate_open():
    usual = preset("few", dataset="cifar10", eta=0.4)
    alike = pd.concat([both(), both(lr=0.03, gain=1), both(lr=0.3, weight_decay=1e-3)])
    alike["epochs"] = usual.epochs
    assert len(runs_like(alike, usual)) == 6
    assert set(runs_like(alike, usual, ["lr"]).lr) == {0.1, 0.03}
    table = cell_table(runs_like(alike, usual, ["lr"]), ["lr"], baseline=runs_of("ce", 40, 42, 42, lr=1))
    assert table.pairs.tolist() == [3] * 4 and table.gain.min() > 9


def test_two_losses_that_guess_have_no_gain():
    table = cell_table(pd.concat([runs_of("ce", 10, 12), runs_of("mae", 19, 9), runs_of("tce:1", 40, 41)]))
    assert table.gain.isna().tolist() == [True, True, False]


def test_tables_show_what_diverged_and_what_is_missing():
    gone = runs_of("tce:2", math.nan).assign(diverged=3)
    text = table_markdown(accuracy_table(pd.concat([both(), gone]), "table2"), "All.", "table-2")
    assert "diverged<br>*88.40 (+4.67)*" in text and "–<br>*97.09 (+0.52)*" in text
    assert "51.0 ± 1.0 (3)<br>last 51.0<br>*83.73*" in text and text.count("**") == 2  # one significant gain
    assert text.startswith(":::{table} All.\n:name: table-2\n") and text.endswith(":::")
    assert "| MNIST<br>η = 0 | MNIST<br>η = 0.4 |" in text


def test_one_seed_has_no_bold_and_the_digits_of_the_test_set():
    frame = pd.concat([runs_of("ce", 99.31, dataset="mnist"), runs_of("tce:1.5", 99.52, dataset="mnist")])
    text = table_markdown(cell_table(frame), "", "x")
    assert "99.31 (1)" in text and "99.52 (1)<br>last 99.5<br>+0.2 |" in text and "**" not in text


def test_the_normalised_loss_has_a_row_of_its_own():
    text = table_markdown(accuracy_table(pd.concat([both(), runs_of("ntce:1.5", 56, 57, 58)]), "table2"), "", "x")
    rows = re.findall(r"^\| ([^|]*) \|", text, re.M)
    assert rows[2:] == ["CE", "MSE", "MAE", *(f"TCE α&nbsp;=&nbsp;{a}" for a in ("0.5", "1", "1.5", "2")), "normalised TCE α&nbsp;=&nbsp;1.5"]


def history_of(runs, accuracies, memorised=None):
    half = len(accuracies) // 2
    return pd.DataFrame([dict(name=name, epoch=epoch, lr=0.1 if epoch <= half else 0.01, test_accuracy=a / 100, memorised=memorised)
                         for name in runs.name for epoch, a in enumerate(accuracies, 1)])


def test_overfitting_compares_fixed_stretches():
    runs = runs_of("ce", 50, 51)
    table = overfit_after_drop(runs, history_of(runs, [20, 30] * 8 + [60] * 8 + [50] * 8, 0.4))
    assert table[["early", "drop", "after", "end", "rise", "memorised"]].round(9).drop_duplicates().values.tolist() == [
        [0, 30, 40, 50, 10, 40]]
    assert overfit_after_drop(runs, history_of(runs, [50]).assign(lr=0.1)).rise.isna().all()
    assert overfit_after_drop(runs[:0], history_of(runs, [50])).empty
    assert curves(runs, history_of(runs, [20, 30])).error.tolist() == [80, 70] * 2


def test_speed_is_fractional_and_never_negative():
    assert epochs_to(50, [40, 60]) == 1.5 and epochs_to(0, [30]) == 0 and epochs_to(50, [50, 50]) == math.inf
    runs = pd.concat([runs_of("ce", 80, 80, scale="short"), runs_of("mae", 10, scale="short")])
    assert speed_threshold(runs, "cifar10") == 70
    points = speed_points(runs, history_of(runs, [60, 80, 80]), 70)
    assert points.index.tolist() == ["ce"] and points.epochs.tolist() == [1.5] and points.reached.tolist() == [2]
    assert speed_points(runs, history_of(runs, [60]), 70).epochs.isna().all()
    assert math.isnan(speed_threshold(runs_of("tce:1", 50), "cifar10"))


# digits and README

def test_the_digits_comparison_says_what_it_found():
    runs = both("digits", gain=4, dataset="digits")
    found = digits_comparison(runs)
    assert found.gain.significant and found.by_seed.shape == (3, 2) and "gained +4.2 points" in found.text
    assert "within chance" in digits_comparison(runs.groupby("method").head(1)).text
    assert "lost" in digits_comparison(both("digits", gain=-9, dataset="digits")).text
    assert digits_comparison(runs[runs.method == "ce"]).gain is None and "tce sweep --preset digits" in digits_comparison(runs[:0]).text


def test_the_readme_keeps_its_marks_and_its_text(tmp_path):
    path = tmp_path/"README.md"
    path.write_text("Before.\n<!-- records -->\noutdated\n<!-- end of records -->\nAfter.\n")
    for _ in range(2): update_readme(path, both())
    text = path.read_text()
    assert text.startswith("Before.\n<!-- records -->\n\n| data") and text.endswith("\n\n<!-- end of records -->\nAfter.\n")
    assert "CIFAR-10, 40%" in text and "outdated" not in text and "128 epochs, 5,000 images, 3 seeds" in " ".join(text.split())


def test_the_committed_records_fill_tables_and_readme():
    frame, history = gather(HERE), histories(HERE)
    shown = reported_runs(frame)
    assert not shown.duplicated(["dataset", "eta", "method", "seed"]).any()
    for which in ("table1", "table2"):
        table = accuracy_table(frame, which)
        assert len(table) >= len(paper_numbers(which)) and table.n.sum() > 0
        known = table.dropna(subset=["low"])
        assert ((known.low <= known.gain) & (known.gain <= known.high)).all()
        assert table_markdown(table, "", "x").count("**") == 2 * table.significant.sum()
    lines = readme_table(frame).split("\n\n")[0].split("\n")
    assert 4 <= len(lines) <= 10 and "seed" in scale_text(shown)
    assert overfit_after_drop(shown[:3], history).rise.notna().all()
