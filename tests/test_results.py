"""Results: which runs count, the one statistic, and what tables, curves and the README show of them."""
import math
import runpy

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from made_up import make_up
from scipy import stats

from tce_nb.report.figures import plot_gains, plot_learning
from tce_nb.report.paper import paper_numbers
from tce_nb.report.results import (
    Gain, accuracy_table, accuracy_text, best_rate_table, cell_table, curves, digits_comparison, epochs_to,
    gain, overfit_after_drop, reported_runs, scale_text, speed_points, speed_threshold, table_markdown)
from tce_nb.run.config import Config
from tce_nb.run.plan import plan
from tce_nb.run.records import gather, histories

readme_table, update_readme = map(runpy.run_path(str(ROOT/"nbs/make_readme.py")).get, ("readme_table", "update_readme"))
HERE, UNIFORM = ROOT/"results", [Config.noise]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)  # the paper's numbers are found from here


def runs_of(method, *accuracies, scale="few", first=1, **column):
    "Runs that never were, with these accuracies in percent at both readings"
    whole = scale in ("paper", "cpu")
    usual = dict(vars(Config()), dataset="cifar10", eta=0.4, version="", classes=10, tested_on=10_000, diverged=None, epochs=128,
                 hold_out=0.0 if whole else 0.1, train_per_class=500, trained_on=4500, held_out=500, wrong_rate=0.36)
    return pd.DataFrame([dict(usual, scale=scale, **column) | dict(
        method=method, seed=seed, name=f"{method}-{scale}-{seed}-{column}", cell=f"{method}-{scale}-{column}",
        selected=accuracy / 100, last=accuracy / 100) for seed, accuracy in enumerate(accuracies, first)])


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


def test_a_gain_is_of_one_loss_and_one_scale():
    mixed = pd.concat([runs_of("ce", 50), runs_of("tce:1", 51)])
    for call in (lambda: gain(mixed, runs_of("tce:2", 50)), lambda: cell_table(mixed.assign(method="ce"))):
        with pytest.raises(ValueError, match="several with one seed"): call()
    assert gain(runs_of("tce:1", 60, scale="short"), runs_of("ce", 50)) is None
    assert str(gain(runs_of("tce:1", 54, 56, 58), runs_of("ce", 49.9, 51.9, 53.9))) == "+4.1"  # a tie has no interval


@pytest.mark.parametrize("found, text", [
    (Gain(3.21, 3, 1.04, 5.38), "+3.2 [+1.0, +5.4]"), (Gain(-0.213, 5, -0.25, -0.18), "−0.21 [−0.25, −0.18]"),
    (Gain(6.3, 3, -4.8, 17.4), "+6 [−5, +17]"), (Gain(-0.01), "+0.0")])
def test_a_gain_has_as_many_digits_as_its_interval_carries(found, text):
    assert str(found) == text and found.words.startswith(text.partition(" ")[0] + " points (")


# which runs count


def test_a_column_shows_the_first_scale_that_compares():
    cpu, alone = both("cpu"), runs_of("ce", 84, scale="paper")
    for parts, scale in (([cpu, both(), both("short"), alone], "short"), ([cpu, both()], "few"), ([cpu, runs_of("ce", 50)], "cpu")):
        assert set(reported_runs(pd.concat(parts)).scale) == {scale}
    frame = pd.concat([both(), both("cpu", eta=0.8), both("cpu", noise="pair_flip")])
    shown = reported_runs(frame)
    assert dict(zip(shown.eta, shown.scale)) == {0.4: "few", 0.8: "cpu"}
    assert len(reported_runs(frame, noise=None)) == 18 and len(reported_runs(frame, "cifar10", [0.8])) == 6
    assert reported_runs(frame, "mnist").empty and reported_runs(frame.assign(scale="custom")).empty


def test_a_run_counts_once_on_one_version_held_out_or_in_full():
    again = both()[:1].assign(name="again", device="cuda")
    other = both()[:2].assign(name="other", version="another split")
    assert len(reported_runs(pd.concat([both(), again, other]))) == 6
    full, held = both("paper"), both("paper").assign(hold_out=5000, name="held")
    assert reported_runs(pd.concat([held, full])).hold_out.eq(0).all()
    only = held.assign(seed=0).drop_duplicates("method")
    assert len(reported_runs(only)) == len(reported_runs(pd.concat([only, runs_of("ce", 84, scale="paper")]))) == 2
    assert reported_runs(pd.concat([both().assign(hold_out=0.0, name="full"), both()])).hold_out.eq(0.1).all()
    assert reported_runs(both().assign(hold_out_noisy=False)).empty


@pytest.fixture
def with_new_scales(tmp_path):
    "The oldest records, one seed of CE and TCE at `few` on CIFAR-10 at 40%, and at `short` on CIFAR-100 at 80%"
    old = gather(HERE).query("scale == 'cpu'")
    jobs = plan("few", ["cifar10"], ["ce", "tce"], [0.4], 1, UNIFORM) + plan("short", ["cifar100"], ["ce", "tce"], [0.8], 1, UNIFORM)
    make_up([job for job in jobs if job.config.lr == 0.1], tmp_path)
    assert len(list(tmp_path.glob("records/*"))) == 10
    before = histories(HERE)[lambda rows: rows.name.isin(old.name)]
    return pd.concat([old, gather(tmp_path)]), pd.concat([before, histories(tmp_path)])


def test_tables_and_readme_show_new_records_for_old_with_their_scale(with_new_scales):
    frame, _ = with_new_scales
    table = accuracy_table(frame, "table2").set_index(["eta", "dataset", "method"])
    new, old = table.loc[(0.4, "cifar10", "tce:1.5")], table.loc[(0.8, "cifar10", "tce:1.5")]
    assert (new.scale, new.n, new.pairs, new.significant, old.scale) == ("few", 1, 1, False, "cpu")
    assert not math.isnan(new.gain) and pd.isna(new.low) and table.n[0.4, "cifar10", "mse"] == 0
    text = table_markdown(table.reset_index(), "", "x")
    for head in ("η = 0.4<br>128 epochs, 5,000 images |", "η = 0.8<br>40 epochs, 5,000 images |"): assert f"CIFAR-10<br>{head}" in text
    rows = {line.split(" |")[0]: line for line in readme_table(frame).splitlines()}
    assert "| 128 epochs, 5,000 images |" in rows["| CIFAR-10, 40%"] and "(1)" in rows["| CIFAR-10, 40%"]
    assert "| 64 epochs, all images |" in rows["| CIFAR-100, 80%"] and "| 40 epochs, " in rows["| MNIST, 40%"]
    assert "**" not in rows["| CIFAR-10, 40%"] + rows["| CIFAR-100, 80%"] and "**" in rows["| MNIST, 40%"]


def test_figures_show_new_records_for_old_with_their_scale(with_new_scales):
    frame, history = with_new_scales
    labels = [label.get_text() for label in plot_gains(accuracy_table(frame, "table1")).axes[0].get_yticklabels()]
    assert {"CIFAR-100, η = 0.8, short", "CIFAR-100, η = 0.4, cpu"} <= set(labels)
    shown = reported_runs(frame, "cifar10")
    titles = [axes.get_title() for axes in plot_learning(curves(shown, history)).axes]
    assert titles[:3] == ["(a) η = 0, cpu", "(b) η = 0.4, few", "(c) η = 0.8, cpu"]
    column = shown[shown.eta == 0.4]
    points = speed_points(column, history, speed_threshold(column, "cifar10"))
    assert {"ce", "tce:1.5"} <= set(points.index) and points.n.eq(1).all() and 30 < points.epochs["ce"] < 64
    assert overfit_after_drop(column, history).rise.between(0, 3).all() and scale_text(column) == "128 epochs, 5,000 images, 1 seed"


# learning rates

def at_rates():
    "GCE does better at 0.01 on the validation set, CE at 0.1; on the test set it is the other way round"
    slow = [runs_of("ce", 59, 60, scale="custom", lr=0.01), runs_of("gce", 50, 51, scale="custom", lr=0.01)]
    runs = pd.concat([both(), runs_of("gce", 54, 55), *slow, runs_of("gce", 90, scale="custom", lr=0.01, epochs=99)])
    good = (runs.method == "gce") == (runs.lr == 0.01)
    return runs, pd.DataFrame(dict(name=runs.name, epoch=1, val_accuracy=0.3 + 0.1 * good))


def test_each_loss_is_taken_at_the_rate_of_the_better_validation_accuracy():
    frame, history = at_rates()
    table = best_rate_table(frame, history, reported_runs(frame))
    assert table.lr.to_dict() == {"ce": 0.1, "tce:1.5": 0.1, "gce": 0.01} and set(table.scale) == {"few"}
    assert table.gain["gce"] == pytest.approx(-0.5) and table.pairs["gce"] == 2  # over CE at 0.1
    assert table.tried.to_dict() == {"ce": [0.01, 0.1], "tce:1.5": [0.1], "gce": [0.01, 0.1]}
    assert accuracy_text(table.loc["gce"]) == "50.5 ± 0.7 (2)"


def test_rates_are_compared_on_equal_seeds_and_one_that_diverged_loses():
    frame, history = at_rates()
    lucky = history.assign(val_accuracy=history.val_accuracy.where(~history.name.str.contains("gce-few-2"), 0.9))
    assert best_rate_table(frame[frame.name != "gce-custom-2-{'lr': 0.01}"], lucky, reported_runs(frame)).lr["gce"] == 0.01
    gone = history.assign(val_accuracy=history.val_accuracy.where(~history.name.str.contains("gce-custom")))
    assert best_rate_table(frame, gone, reported_runs(frame)).lr["gce"] == 0.1


def test_full_runs_take_the_rate_of_their_cells_hold_out_runs():
    frame, history = at_rates()
    full = frame.assign(hold_out=0.0, name=frame.name + "full", scale=frame.scale.replace("few", "paper"))
    frame = pd.concat([full, frame.assign(scale="custom")])
    assert best_rate_table(frame, history, reported_runs(frame)).lr["gce"] == 0.01


# tables

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


# curves and speed

def history_of(runs, accuracies, memorised=None):
    half = len(accuracies) // 2
    return pd.DataFrame([dict(name=name, epoch=epoch, lr=0.1 if epoch <= half else 0.01, test_accuracy=a / 100, memorised=memorised)
                         for name in runs.name for epoch, a in enumerate(accuracies, 1)])


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
    by_seed, found, text = digits_comparison(runs)
    assert found.significant and by_seed.shape == (3, 2) and "gained +4.2 points" in text
    assert "within chance" in digits_comparison(runs.groupby("method").head(1))[2]
    assert "lost" in digits_comparison(both("digits", gain=-9, dataset="digits"))[2]
    assert digits_comparison(runs[runs.method == "ce"])[1] is None and "tce sweep --preset digits" in digits_comparison(runs[:0])[2]


def test_the_readme_keeps_its_marks_and_its_text(tmp_path):
    path = tmp_path/"README.md"
    path.write_text("Before.\n<!-- records -->\noutdated\n<!-- end of records -->\nAfter.\n")
    for _ in range(2): update_readme(path, both())
    text = path.read_text()
    assert text.startswith("Before.\n<!-- records -->\n\n| data") and text.endswith("\n\n<!-- end of records -->\nAfter.\n")
    assert "| CIFAR-10, 40% | 128 epochs, 5,000 images |" in text and "outdated" not in text


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
