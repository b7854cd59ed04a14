"""Records: named by what they ran, whole or not there, never silently counted."""
import json
import math
import os
from dataclasses import asdict, fields, replace

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, save_npz

from tce_nb.run.records import (
    Files, RecordError, cells, counted, find_selected, gather,
    histories, is_running, read_record, readings, record_config,
    record_history, record_run, recorded, results_folder, write_record)
from tce_nb.run.config import PRESETS, Config, cell_of, preset, run_name, scale_of
from tce_nb.run.train import make_task, train

TINY = Config(train_per_class=8, test_per_class=4, batch_size=16, depth=8, epochs=3, eta=0.4, device="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A folder with a hold-out run and two full ones"
    folder = tmp_path_factory.mktemp("results")
    record_run(replace(TINY, hold_out=0.1), folder)
    for seed in (1, 2): record_run(replace(TINY, seed=seed), folder)
    return folder


OTHER = dict(dataset="mnist", train_per_class=9, test_per_class=5, loss="ce", alpha=1.0, eta=0.2,
             noise="uniform_excluding_true", hold_out=0.1, seed=1, epochs=4, milestones=(2,), lr=0.2,
             momentum=0.8, weight_decay=0.0, batch_size=8, depth=14, precision="bfloat16", compile=True, optimizer="adam")


def test_a_different_run_has_a_different_name():
    names = {run_name(TINY), *(run_name(replace(TINY, **{k: v})) for k, v in OTHER.items())}
    assert len(names) == 1 + len(OTHER)
    assert set(OTHER) == {f.name for f in fields(Config)} - {"device", "hold_out_noisy"}
    held = replace(TINY, hold_out=0.1)
    assert run_name(held) != run_name(replace(held, hold_out_noisy=False))
    adam = replace(TINY, optimizer="adam")
    assert run_name(adam) == run_name(replace(adam, momentum=0.8)), "it has no momentum"


@pytest.mark.parametrize("change", [
    dict(device="auto"), dict(device="cuda:1"), dict(hold_out_noisy=False), dict(milestones=(2, 3)),
    dict(milestones=(3, 2, 7))], ids=str)
def test_the_same_run_has_the_same_name(change):
    assert run_name(replace(TINY, **change)) == run_name(TINY)


@pytest.mark.parametrize("scale", PRESETS)
def test_the_scale_is_read_off_the_configuration(scale):
    assert scale_of(preset(scale, dataset="cifar10", loss="mse", eta=0.8, seed=4, hold_out=0.1)) == scale
    for change in (dict(lr=0.3), dict(optimizer="adam", lr=0.1)):
        assert scale_of(preset(scale, dataset="cifar10", **change)) == "custom"


def test_names_do_not_change_from_version_to_version():
    "If this fails, every record of the project has lost its name"
    config = Config("cifar100", 100, 50, loss="ce", eta=0.4, hold_out=0.1, epochs=30, device="cpu")
    assert run_name(config) == "cifar100-ce-eta0.4-select-seed0-d2baeca10b06"
    few = preset("few", dataset="cifar10", loss="ce", eta=0.4, seed=1)
    assert run_name(few) == "cifar10-ce-eta0.4-select-seed1-fab9013a8302"
    assert run_name(replace(few, loss="tce")) == "cifar10-tce1.5-eta0.4-select-seed1-2d5d9ef195cf"


def test_a_file_counts_by_its_content(tmp_path):
    (tmp_path/"x").mkdir()
    one, same = save_npz(tmp_path/"mine.npz"), save_npz(tmp_path/"x"/"mine.npz")
    config = replace(TINY, dataset=one, train_per_class=None, test_per_class=None)
    assert run_name(config) == run_name(replace(config, dataset=same))
    before = run_name(config)
    save_npz(one, seed=1)
    os.utime(one, ns=(1, 1))
    assert run_name(config) != before
    record_run(replace(config, epochs=1), tmp_path)
    os.unlink(one)  # the record outlives the data
    assert len(gather(tmp_path)) == 1


def test_noise_from_a_file_counts_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    config = replace(TINY, noise="transition:T.npy", eta=1.0, epochs=1)
    np.save(tmp_path/"T.npy", 0.9 * np.eye(10) + 0.1 * np.roll(np.eye(10), 1, 1))
    first = run_name(config)
    record_run(config, tmp_path)
    np.save(tmp_path/"T.npy", np.full((10, 10), 0.1))
    os.utime(tmp_path/"T.npy", ns=(1, 1))
    assert run_name(config) != first and run_name(replace(config, eta=0.0)) == run_name(
        replace(config, eta=0.0, noise="pair_flip"))
    record_run(config, tmp_path)
    os.unlink(tmp_path/"T.npy")  # the records outlive the file
    frame = gather(tmp_path)
    assert len(frame) == 2 and frame.version.nunique() == 2 and len(cells(frame, "last")) == 2


@pytest.mark.filterwarnings("ignore:.*no image of")
def test_other_images_of_the_same_name_share_no_cell(tmp_path, monkeypatch):
    config = replace(TINY, dataset="svhn", train_per_class=None, test_per_class=None, epochs=1)
    one, two = tmp_path/"one", tmp_path/"two"
    for seed, folder in enumerate((one, two)):
        folder.mkdir()
        save_npz(folder/"svhn.npz", seed, channels=3)
    monkeypatch.setenv("TCE_DATA", str(one))
    record_run(replace(config, hold_out=0.2), tmp_path)
    record_run(replace(config, seed=1), tmp_path)
    monkeypatch.setenv("TCE_DATA", str(two))
    record_run(replace(config, seed=1), tmp_path/"elsewhere")  # in another folder, and brought together by hand
    moved, = (tmp_path/"elsewhere"/"records").iterdir()
    record = json.loads(moved.read_text())
    other = replace(config, seed=2)
    record |= dict(name=run_name(other), config=asdict(other))
    write_record(record, tmp_path)
    frame = gather(tmp_path)
    assert sorted(cells(frame, "last").n) == [1, 1] and frame.version.nunique() == 2


def test_a_loss_that_is_edited_during_a_run_is_recorded_as_it_was(tmp_path, monkeypatch):
    mine = tmp_path/"mine.py"
    mine.write_text("from torch.nn import CrossEntropyLoss as Mine")
    config = replace(TINY, loss=f"{mine}:Mine")
    name, plain = run_name(config), train(replace(config, loss="ce"))
    def edit(run, *_): mine.write_text("from torch.nn import MultiMarginLoss as Mine\n")
    monkeypatch.setattr("tce_nb.run.records.report", edit)
    run = record_run(config, tmp_path, progress=True)
    assert run_name(config) != name and recorded(name, tmp_path) and not recorded(run_name(config), tmp_path)
    assert [row["train_loss"] for row in run.history] == [row["train_loss"] for row in plain.history]


def test_a_loss_of_ones_own_counts_by_its_content(tmp_path):
    (tmp_path/"x").mkdir()
    mine, moved = tmp_path/"mine.py", tmp_path/"x"/"mine.py"
    for file in (mine, moved): file.write_text("from torch.nn import CrossEntropyLoss as Mine, Module\n")
    config = replace(TINY, loss=f"{mine}:Mine", epochs=1)
    assert run_name(config) == run_name(replace(config, loss=f"{moved}:Mine", alpha=3.0))
    assert run_name(config).startswith("digits-Mine-eta0.4-train-seed0-")
    assert run_name(config) != run_name(replace(config, loss=f"{mine}:Module"))
    plain = record_run(replace(config, loss="ce"), tmp_path)
    same = record_run(config, tmp_path)
    assert [row["train_loss"] for row in same.history] == [row["train_loss"] for row in plain.history]
    record_run(replace(config, loss=f"{moved}:Mine", seed=1), tmp_path)
    mine.write_text("from torch.nn import MultiMarginLoss as Mine\n")
    record_run(config, tmp_path)
    for file in (mine, moved): file.unlink()  # the records outlive the file
    table = cells(gather(tmp_path), "last")
    own = table[table.method != "ce"]
    assert sorted(own.n) == [1, 2] and all(own.method.str.fullmatch(r"mine.py:Mine@[0-9a-f]{12}"))
    assert set(table.scale) == {"custom"} and table.changes.nunique() == 1


def test_a_record_says_what_was_run(made):
    record = read_record(Files(run_name(replace(TINY, seed=1)), made).record)
    run = train(replace(TINY, seed=1))
    assert record_config(record) == run.config
    for name, column in record["history"].items():
        if name not in ("seconds", "images_per_second"):
            assert column == [row[name] for row in run.history]
    assert record["wrong_rate"] == run.wrong_rate and record["resumed"] == 0
    assert record["data"] == dict(version=record["data"]["version"], fingerprint=run.task.fingerprint, classes=10, trained_on=80,
                                  held_out=0, tested_on=40)
    assert record["made_on"]["threads"] >= 1 and record["made_on"]["versions"]["torch"]
    last = record["readings"]["last"]
    assert last == dict(epoch=3, test_accuracy=run.history[-1]["test_accuracy"])
    assert np.average(record["end"]["test"]["accuracy"], weights=record["end"]["test"]["size"]) \
        == pytest.approx(last["test_accuracy"])
    seen = record["end"]["labels"]["train"]
    assert sum(seen["wrong"]) == int(run.task.noisy.wrong.sum())
    assert sum(seen["clean"]) + sum(seen["wrong"]) == 80


def test_the_selected_reading_is_at_the_hold_out_runs_epoch(made):
    frame = gather(made)
    assert frame.hold_out.gt(0).sum() == 1
    epoch = frame[frame.hold_out > 0].selected_epoch.item()
    curves = histories(made)
    held = curves[curves.name == frame[frame.hold_out > 0].name.item()]
    assert held.val_accuracy.max() == held[held.epoch == epoch].val_accuracy.item()
    for _, row in frame[frame.hold_out == 0].iterrows():
        curve = curves[curves.name == row["name"]].set_index("epoch").test_accuracy
        assert row.selected == curve[epoch] and row["last"] == curve[3] and row.oracle == curve.max()


def test_a_late_hold_out_run_still_counts(tmp_path):
    "Runs made before their hold-out run are read at its epoch all the same"
    record_run(replace(TINY, seed=1), tmp_path)
    assert gather(tmp_path).selected.isna().all()
    record_run(replace(TINY, hold_out=0.1), tmp_path)
    frame = gather(tmp_path)
    assert frame.selected.notna().all() and frame.selected_epoch.nunique() == 1
    assert find_selected(replace(TINY, seed=5), tmp_path) == frame.selected_epoch[0]


def validate(config, folder, accuracy):
    "Give a record these validation accuracies"
    path = Files(run_name(config), folder).record
    record = json.loads(path.read_bytes())
    record["history"]["val_accuracy"] = accuracy
    record["readings"] = readings(record_history(record), accuracy.index(1.0) + 1)
    path.write_text(json.dumps(record))


def test_an_epoch_typed_in_counts_only_without_a_hold_out_run(tmp_path):
    record_run(TINY, tmp_path, selected=2)
    assert gather(tmp_path).selected_epoch.tolist() == [2]
    held = replace(TINY, hold_out=0.1)
    record_run(held, tmp_path)
    validate(held, tmp_path, [0.0, 0.0, 1.0])
    assert gather(tmp_path).selected_epoch.tolist() == [3, 3]


@pytest.mark.parametrize("lr", [0.1, 0.2])  # the hashes in the names have no order
def test_of_two_hold_out_runs_the_one_on_noisy_labels_selects(tmp_path, lr):
    full = replace(TINY, epochs=2, lr=lr)
    record_run(full, tmp_path)
    for noisy, accuracy in ((True, [1.0, 0.0]), (False, [0.0, 1.0])):
        config = replace(full, hold_out=0.1, hold_out_noisy=noisy)
        record_run(config, tmp_path)
        validate(config, tmp_path, accuracy)
    assert find_selected(full, tmp_path) == 1
    assert gather(tmp_path).set_index("name").selected_epoch[run_name(full)] == 1


def test_without_noise_its_kind_splits_no_cell(tmp_path):
    for seed, noise in ((1, "uniform_including_true"), (2, "pair_flip")):
        record_run(replace(TINY, epochs=1, eta=0.0, noise=noise, seed=seed), tmp_path)
    assert cells(gather(tmp_path), "last").n.tolist() == [2]


def test_a_file_of_noise_is_the_same_wherever_it_is(tmp_path):
    for seed, name in ((1, "a"), (2, "b")):
        (tmp_path/name).mkdir()
        np.save(tmp_path/name/"T.npy", np.eye(10))
        config = replace(TINY, epochs=1, eta=1.0, noise=f"transition:{tmp_path/name}/T.npy", seed=seed)
        record_run(config, tmp_path)
    table = cells(gather(tmp_path), "last")
    assert table.n.tolist() == [2] and table.noise.tolist() == ["transition:T.npy"]


def test_a_training_that_is_asked_for_in_two_ways_counts_once(tmp_path):
    data = save_npz(tmp_path/"mine.npz")  # twenty images of each class
    for count in (None, 20):
        record_run(replace(TINY, epochs=1, dataset=data, train_per_class=count, batch_size=8), tmp_path)
    frame = gather(tmp_path)
    assert len(frame) == 2 and frame["last"].nunique() == 1
    assert cells(frame, "last").n.tolist() == [1]


def test_cells_are_means_over_seeds(made):
    frame, table = gather(made), cells(gather(made), "last")
    full = frame[frame.hold_out == 0]
    assert len(table) == 1 and table.n.item() == 2
    assert table["mean"].item() == pytest.approx(full["last"].mean())
    assert table["std"].item() == pytest.approx(full["last"].std(ddof=1))
    with pytest.raises(ValueError, match="reading: got 'best', expected one of selected, last, oracle"):
        cells(frame, "best")


DAMAGE = {
    "cut": lambda text: text[:-50],
    "no history": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "history"}),
    "edited config": lambda text: text.replace('"lr": 0.1', '"lr": 0.3'),
    "impossible config": lambda text: text.replace('"eta": 0.4', '"eta": 7'),
    "another history": lambda text: text.replace('"epoch": [1, 2, 3]', '"epoch": [1, 2]'),
    "no hardware": lambda text: json.dumps({**json.loads(text), "made_on": {}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_reported_and_not_counted(made, tmp_path, damage):
    for path in made.glob("records/*.json"):
        (tmp_path/"records").mkdir(exist_ok=True)
        (tmp_path/"records"/path.name).write_text(path.read_text())
    victim = Files(run_name(replace(TINY, seed=1)), tmp_path).record
    text = victim.read_text()
    victim.write_text(DAMAGE[damage](text))
    assert victim.read_text() != text
    with pytest.raises(RecordError, match=victim.name): read_record(victim)
    with pytest.warns(UserWarning, match="skipped 1 file"): frame = gather(tmp_path)
    assert len(frame) == 2 and len(frame.attrs["skipped"]) == 1
    assert victim.name in frame.attrs["skipped"][0]


def test_runs_that_differ_in_anything_but_the_seed_share_no_cell(tmp_path):
    for change in (dict(), dict(lr=0.3), dict(alpha=1.0000001), dict(alpha=1.0), dict(batch_size=8)):
        record_run(replace(TINY, epochs=1, seed=1, **change), tmp_path)
    assert cells(gather(tmp_path), "last").n.tolist() == [1] * 5


def test_an_edited_record_of_a_file_is_not_counted(tmp_path):
    "Its file may have gone, but the name says much of what was run"
    config = replace(TINY, dataset=save_npz(tmp_path/"mine.npz"), train_per_class=None, test_per_class=None, epochs=1)
    record_run(config, tmp_path)
    path = Files(run_name(config), tmp_path).record
    (tmp_path/"mine.npz").unlink()
    assert recorded(path.stem, tmp_path)
    path.write_text(path.read_text().replace('"eta": 0.4', '"eta": 0.2'))
    with pytest.raises(RecordError, match="expected mine-tce1.5-eta0.2-train-seed0"): read_record(path)


def test_a_record_names_the_code_that_made_it(tmp_path, monkeypatch):
    "Not that of a commit made meanwhile; and both, if a run goes on with other code"
    commits = iter(["first", "second", "third"])
    monkeypatch.setattr("tce_nb.run.checkpoint.library_commit", lambda: next(commits))
    def stop(run): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(TINY, checkpoint=Files(run_name(TINY), tmp_path).checkpoint, progress=stop)
    record_run(TINY, tmp_path)
    made_on = read_record(Files(run_name(TINY), tmp_path).record)["made_on"]
    assert made_on["commit"] == "second" and [made["commit"] for made in made_on["before"]] == ["first"]
    record_run(replace(TINY, seed=1), tmp_path)
    made_on = read_record(Files(run_name(replace(TINY, seed=1)), tmp_path).record)["made_on"]
    assert made_on["commit"] == "third" and "before" not in made_on


@pytest.mark.parametrize("request_, message", [
    (dict(selected=9), "selected_epoch: got 9, expected None or an epoch from 1 to 3"),
    (dict(selected="abc"), "selected_epoch: got 'abc'")], ids=str)
def test_an_impossible_request_is_refused_before_training(tmp_path, request_, message):
    with pytest.raises(ValueError, match=message): record_run(TINY, tmp_path, **request_)
    assert not list(tmp_path.rglob("*"))


def test_a_renamed_record_is_not_counted(made, tmp_path):
    source = Files(run_name(replace(TINY, seed=1)), made).record
    target = Files(run_name(replace(TINY, seed=9)), tmp_path).record
    target.parent.mkdir()
    target.write_text(source.read_text())
    with pytest.raises(RecordError, match=f"holding {source.stem}, expected {source.stem}"): read_record(target)


def test_an_empty_folder_gives_an_empty_table(tmp_path):
    assert len(gather(tmp_path)) == 0 and "selected" in gather(tmp_path)
    assert len(cells(gather(tmp_path))) == 0 and len(histories(tmp_path)) == 0


def test_a_diverged_run_is_recorded_as_such(tmp_path):
    config = replace(TINY, lr=1e30, loss="mse")
    run = record_run(config, tmp_path)
    assert run.diverged
    record = read_record(Files(run_name(config), tmp_path).record)
    assert record["diverged"] == run.diverged and record["readings"]["last"] is None
    assert "NaN" not in Files(run_name(config), tmp_path).record.read_text()
    frame = gather(tmp_path)
    assert math.isnan(frame["last"][0]) and cells(frame, "last").diverged[0] == 1


def test_only_one_process_computes_a_run(tmp_path, monkeypatch):
    from filelock import FileLock, Timeout
    files = Files(run_name(TINY), tmp_path)
    files.lock.parent.mkdir()
    assert not is_running(run_name(TINY), tmp_path)
    with FileLock(files.lock):
        assert is_running(run_name(TINY), tmp_path)
        with pytest.raises(Timeout, match="could not be acquired"): record_run(TINY, tmp_path)
    assert not is_running(run_name(TINY), tmp_path)
    record_run(TINY, tmp_path)
    with pytest.raises(FileExistsError): record_run(TINY, tmp_path, rerun=False)


RECORDS = sorted((ROOT/"results"/"records").glob("*.json"))


def test_every_committed_record_is_named_by_its_run_and_read_as_its_history_says():
    assert len(RECORDS) >= 200
    for path in RECORDS:
        record = json.loads(path.read_bytes())
        config, history = record_config(record), record_history(record)
        assert path.stem == record["name"] == run_name(config) and record["cell"] == cell_of(config)
        assert read_record(path) == record
        accuracy = record["history"]["test_accuracy"]
        given = record["readings"]
        if config.hold_out:
            best = record["history"]["val_accuracy"]
            assert given["selected"]["epoch"] == 1 + best.index(max(best))
        for reading in filter(None, given.values()):
            assert reading["test_accuracy"] == accuracy[reading["epoch"] - 1]
        assert given["oracle"]["test_accuracy"] == max(accuracy) and given["last"]["epoch"] == len(history)


def test_runs_with_a_hold_out_count_by_themselves_where_the_scale_has_one_stage(made):
    frame = gather(made)
    held, full = frame[frame.hold_out > 0], frame[frame.hold_out == 0]
    assert held.selected.notna().all() and held["last"].notna().all()
    assert len(counted(frame)) == 2, "the hold-out run of a cell only selects for its full runs"
    assert len(counted(held)) == 1, "unless there are none"
    for scale in ("digits", "few", "short", "paper"):
        assert sorted(cells(frame.assign(scale=scale)).n) == [1, 2]
    assert len(counted(held.assign(scale="smoke"))) == 0
    assert cells(pd.concat([held, full])).n.tolist() == [2]


def test_a_task_that_is_ready_is_not_made_again(tmp_path, monkeypatch):
    task = make_task(TINY)
    monkeypatch.setattr("tce_nb.run.train.make_task", lambda *_: pytest.fail("made again"))
    assert record_run(TINY, tmp_path, task=task).task is task


def test_the_results_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TCE_RESULTS", raising=False)
    assert results_folder(tmp_path/"a") == tmp_path/"a"
    monkeypatch.chdir(tmp_path)
    assert results_folder() == tmp_path/"results"
    monkeypatch.setenv("TCE_RESULTS", "elsewhere")
    assert results_folder() == tmp_path/"elsewhere"
