"""Records: named by what they ran, whole or not there, never silently counted."""
import json
import math
import os
import re
import warnings
from dataclasses import asdict, fields, replace

import numpy as np
import pandas as pd
import pytest
from conftest import save_npz

from tce_nb.records import (
    AlreadyRecorded, Busy, Files, RecordError, cell_of, cells, find_selected, gather, histories,
    is_running, make_record, paired_difference, paper_numbers, read_record, readings, record_config, record_history,
    record_run, recorded, results_folder, run_name, scale_of, version_of, write_record)
from tce_nb.training import Config, preset, train

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
             momentum=0.8, weight_decay=0.0, batch_size=8, depth=14, precision="bfloat16", compile=True)


def test_a_different_run_has_a_different_name():
    names = {run_name(TINY), *(run_name(replace(TINY, **{k: v})) for k, v in OTHER.items())}
    assert len(names) == 1 + len(OTHER)
    assert set(OTHER) == {f.name for f in fields(Config)} - {"device", "hold_out_noisy"}
    held = replace(TINY, hold_out=0.1)
    assert run_name(held) != run_name(replace(held, hold_out_noisy=False))


@pytest.mark.parametrize("change", [
    dict(device="auto"), dict(device="cuda:1"), dict(hold_out_noisy=False), dict(milestones=(2, 3)),
    dict(milestones=(3, 2, 7))], ids=str)
def test_the_same_run_has_the_same_name(change):
    assert run_name(replace(TINY, **change)) == run_name(TINY)


def test_names_do_not_change_from_version_to_version():
    "If this fails, every record of the project has lost its name"
    config = Config("cifar100", 100, 50, loss="ce", eta=0.4, hold_out=0.1, epochs=30, device="cpu")
    assert run_name(config) == "cifar100-ce-eta0.4-select-seed0-d2baeca10b06"


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
    with pytest.raises(ValueError, match="dataset: the images or labels of svhn .* expected another folder of results"):
        record_run(replace(config, seed=2), tmp_path)
    record_run(replace(config, seed=1), tmp_path/"elsewhere")  # in another folder, and brought together by hand
    moved, = (tmp_path/"elsewhere"/"records").iterdir()
    record = json.loads(moved.read_text())
    other = replace(config, seed=2)
    record |= dict(name=run_name(other), config=asdict(other))
    write_record(record, tmp_path)
    frame = gather(tmp_path)
    assert sorted(cells(frame, "last").n) == [1, 1] and frame.version.nunique() == 2
    assert cells(frame).n.sum() == 1  # the hold-out run selects no epoch on other images


def test_a_loss_that_is_edited_during_a_run_is_recorded_as_it_was(tmp_path, monkeypatch):
    mine = tmp_path/"mine.py"
    mine.write_text("from torch.nn import CrossEntropyLoss as Mine")
    config = replace(TINY, loss=f"{mine}:Mine")
    name, plain = run_name(config), train(replace(config, loss="ce"))
    def edit(run, *_): mine.write_text("from torch.nn import MultiMarginLoss as Mine\n")
    monkeypatch.setattr("tce_nb.records.report", edit)
    run = record_run(config, tmp_path, progress=True)
    assert run_name(config) != name and recorded(name, tmp_path) and not recorded(run_name(config), tmp_path)
    assert [row["train_loss"] for row in run.history] == [row["train_loss"] for row in plain.history]


def test_a_loss_that_is_edited_during_a_run_keeps_its_own_selected_epoch(tmp_path, monkeypatch):
    mine, versions = tmp_path/"mine.py", [f"from torch.nn import {loss} as Mine" for loss in
                                          ("CrossEntropyLoss", "MultiMarginLoss")]
    config = replace(TINY, epochs=3, loss=f"{mine}:Mine")
    for version, epoch in zip(versions, (1, 3)):
        mine.write_text(version)
        held = train(replace(config, hold_out=0.1))
        for row in held.history: row["val_accuracy"] = float(row["epoch"] == epoch)
        write_record(make_record(held), tmp_path)
    mine.write_text(versions[0])
    name = run_name(config)
    monkeypatch.setattr("tce_nb.records.report", lambda *_: mine.write_text(versions[1]))
    record_run(config, tmp_path, progress=True)
    assert read_record(Files(name, tmp_path).record)["readings"]["selected"]["epoch"] == 1


def test_mirrored_or_not_it_is_another_version(tmp_path):
    arrays = {**np.load(save_npz(tmp_path/"mine.npz"))}
    config = replace(TINY, dataset=str(tmp_path/"mine.npz"), train_per_class=None, test_per_class=None, epochs=1)
    for seed, mirror in enumerate((True, False)):
        np.savez(tmp_path/"mine.npz", **arrays, mirror=mirror)
        os.utime(tmp_path/"mine.npz", ns=(seed, seed))
        record_run(replace(config, seed=seed), tmp_path)
    assert sorted(cells(gather(tmp_path), "last").n) == [1, 1]


def test_of_two_versions_each_has_its_own_hold_out_run(tmp_path):
    config = replace(TINY, epochs=4)
    def held(version, epoch, **changes):
        run = train(replace(config, hold_out=0.1, **changes))
        for row in run.history: row["val_accuracy"] = float(row["epoch"] == epoch)
        record = make_record(run)
        write_record(record | dict(data=record["data"] | dict(version=version)), tmp_path)
    held("one", 2)
    held("two", 4, hold_out_noisy=False)
    assert find_selected(config, tmp_path, "one") == find_selected(config, tmp_path) == 2
    assert find_selected(config, tmp_path, "two") == 4 and find_selected(config, tmp_path, "three") is None


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
    assert set(table.scale) == {"custom"} and table.recipe.nunique() == 1


def test_a_record_says_what_was_run(made):
    record = read_record(Files(run_name(replace(TINY, seed=1)), made).record)
    run = train(replace(TINY, seed=1))
    assert record_config(record) == run.config
    for name, column in record["history"].items():
        if name not in ("seconds", "images_per_second"):
            assert column == [row[name] for row in run.history]
    assert record["wrong_rate"] == run.wrong_rate and record["resumed"] == 0
    assert record["data"] == dict(version=version_of(run.identity, run.task), fingerprint=run.task.fingerprint, classes=10, trained_on=80,
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


def test_an_epoch_typed_in_counts_only_without_a_hold_out_run(tmp_path):
    record_run(TINY, tmp_path, selected=2)
    assert gather(tmp_path).selected_epoch.tolist() == [2]
    held = replace(TINY, hold_out=0.1)
    record_run(held, tmp_path)
    path = Files(run_name(held), tmp_path).record
    record = json.loads(path.read_bytes())
    record["history"]["val_accuracy"] = [0.0, 0.0, 1.0]
    record["readings"] = readings(record_history(record), 3)
    path.write_text(json.dumps(record))
    assert gather(tmp_path).selected_epoch.tolist() == [3, 3]


@pytest.mark.parametrize("lr", [0.1, 0.2, 0.3, 0.4])  # the hashes in the names have no order
def test_of_two_hold_out_runs_the_one_on_noisy_labels_selects(tmp_path, lr):
    full = replace(TINY, epochs=2, lr=lr)
    record_run(full, tmp_path)
    for noisy, accuracy in ((True, [1.0, 0.0]), (False, [0.0, 1.0])):
        config = replace(full, hold_out=0.1, hold_out_noisy=noisy)
        record_run(config, tmp_path)
        path = Files(run_name(config), tmp_path).record
        record = json.loads(path.read_bytes())
        record["history"]["val_accuracy"] = accuracy
        record["readings"] = readings(record_history(record), accuracy.index(1.0) + 1)
        path.write_text(json.dumps(record))
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
    path = tmp_path/"run.pt"
    train(config, checkpoint=path)
    (tmp_path/"b").rename(tmp_path/"c")
    moved = replace(config, noise=f"transition:{tmp_path}/c/T.npy")
    assert train(moved, checkpoint=path).finished


def test_drops_that_are_said_or_not_are_the_same_cell(tmp_path):
    for seed, milestones in ((1, None), (2, (2, 3))):
        record_run(replace(TINY, epochs=3, milestones=milestones, seed=seed), tmp_path)
    assert cells(gather(tmp_path), "last").n.tolist() == [2]
    assert "milestones" not in gather(tmp_path).changes.str.cat()


def test_a_training_that_is_asked_for_in_two_ways_counts_once(tmp_path):
    data = save_npz(tmp_path/"mine.npz")  # twenty images of each class
    for count in (None, 20):
        record_run(replace(TINY, epochs=1, dataset=data, train_per_class=count, batch_size=8), tmp_path)
    frame = gather(tmp_path)
    assert len(frame) == 2 and frame["last"].nunique() == 1
    assert cells(frame, "last").n.tolist() == [1]


def test_a_difference_is_one_of_single_runs(made):
    frame = gather(made)
    full = frame[frame.hold_out == 0]
    both = pd.concat([full, full.assign(method="ce", last=full["last"] - 0.25)])
    assert paired_difference(both, full.method.iloc[0], reading="last")["mean"] == pytest.approx(0.25)
    assert paired_difference(pd.concat([both, both]), full.method.iloc[0], reading="last")["n"] == len(full)
    with pytest.raises(ValueError, match="frame: got several runs with the same seed and loss, expected"):
        paired_difference(pd.concat([both, both.assign(recipe="another")]), full.method.iloc[0])


def test_cells_are_means_over_seeds(made):
    frame, table = gather(made), cells(gather(made), "last")
    full = frame[frame.hold_out == 0]
    assert len(table) == 1 and table.n.item() == 2
    assert table["mean"].item() == pytest.approx(full["last"].mean())
    assert table["std"].item() == pytest.approx(full["last"].std(ddof=1))
    with pytest.raises(ValueError, match="reading: got 'best', expected selected, last or oracle"):
        cells(frame, "best")


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[:-50],
    "not json": lambda text: "hello",
    "a list": lambda text: "[1, 2]",
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 99'),
    "no history": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "history"}),
    "shorter history": lambda text: text.replace('"epoch": [1, 2, 3]', '"epoch": [1, 2]'),
    "edited config": lambda text: text.replace('"lr": 0.1', '"lr": 0.3'),
    "impossible config": lambda text: text.replace('"eta": 0.4', '"eta": 7'),
    "unknown field": lambda text: text.replace('"eta": 0.4', '"etta": 0.4'),
    "history of strings": lambda text: text.replace('"history": {', '"history": "x", "was": {'),
    "too deep": lambda text: "[" * 200_000,
    **{f"wrong {key}": lambda text, key=key, value=value: json.dumps({**json.loads(text), key: value})
       for key, value in dict(made_on={}, readings=None, data=[], config={}).items()},
    "data that takes a name": lambda text: text.replace('"data": {', '"data": {"name": 1, '),
    "a better reading": lambda text: re.sub(r'("last": {"epoch": 3, "test_accuracy": )[0-9.]+', r"\g<1>0.999", text),
    "a reading of another epoch": lambda text: text.replace('"last": {"epoch": 3', '"last": {"epoch": 2'),
    "a history without numbers": lambda text: re.sub(
        r'"test_accuracy": \[[^]]*\]', '"test_accuracy": [null, null, null]', text),
    "a reading of letters": lambda text: re.sub(r'"test_accuracy": [0-9.]+', '"test_accuracy": "x"', text),
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
    with pytest.raises(RecordError, match="but its run is mine-tce1.5-eta0.2-train-seed0"): read_record(path)


def test_a_record_from_windows_is_in_the_same_cell(tmp_path):
    config = replace(TINY, dataset=save_npz(tmp_path/"mine.npz"), train_per_class=None, test_per_class=None, epochs=1)
    for seed in (1, 2): record_run(replace(config, seed=seed), tmp_path)
    path = Files(run_name(replace(config, seed=1)), tmp_path).record
    record = json.loads(path.read_text())
    record["config"]["dataset"] = "C:\\data\\mine.npz"
    path.write_text(json.dumps(record))
    assert cells(gather(tmp_path), "last").n.tolist() == [2]


def test_a_record_names_the_code_that_made_it(tmp_path, monkeypatch):
    "Not that of a commit made meanwhile; and both, if a run goes on with other code"
    from tce_nb import training
    commits = iter(["first", "second", "third"])
    monkeypatch.setattr(training, "library_commit", lambda: next(commits))
    def stop(run): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(TINY, checkpoint=Files(run_name(TINY), tmp_path).checkpoint, progress=stop)
    with pytest.warns(UserWarning, match="goes on with other code"): record_run(TINY, tmp_path)
    made_on = read_record(Files(run_name(TINY), tmp_path).record)["made_on"]
    assert made_on["commit"] == "second" and [made["commit"] for made in made_on["before"]] == ["first"]
    record_run(replace(TINY, seed=1), tmp_path)
    made_on = read_record(Files(run_name(replace(TINY, seed=1)), tmp_path).record)["made_on"]
    assert made_on["commit"] == "third" and "before" not in made_on


@pytest.mark.parametrize("request_, message", [
    (dict(selected=9), "selected_epoch: got 9, expected None or an epoch from 1 to 3"),
    (dict(selected="abc"), "selected_epoch: got 'abc'"), (dict(selected=True), "selected_epoch: got True"),
    (dict(rerun="false"), "rerun: got 'false', expected True or False")], ids=str)
def test_an_impossible_request_is_refused_before_training(tmp_path, request_, message):
    with pytest.raises(ValueError, match=message): record_run(TINY, tmp_path, **request_)
    assert not list(tmp_path.rglob("*"))


def test_an_interrupted_run_goes_on_under_any_of_its_descriptions(tmp_path):
    "What has one name can be resumed as one run"
    path, data = tmp_path/"run.pt", save_npz(tmp_path/"mine.npz")
    os.rename(data, tmp_path/"moved.npz")
    moved = str(tmp_path/"moved.npz")
    for before, after in (
            (dict(eta=0.0), dict(eta=-0.0, noise="uniform_excluding_true")), (dict(), dict(milestones=(2, 3))),
            (dict(loss="ce"), dict(loss="ce", alpha=0.5)), (dict(), dict(device="auto"))):
        first, second = replace(TINY, **before), replace(TINY, **after)
        assert run_name(first) == run_name(second)
        train(first, checkpoint=path)
        assert train(second, checkpoint=path).finished
        path.unlink()
    whole = dict(train_per_class=None, test_per_class=None)
    train(replace(TINY, dataset=moved, **whole), checkpoint=path)
    os.rename(moved, data)
    assert train(replace(TINY, dataset=data, **whole), checkpoint=path).finished


def test_a_renamed_record_is_not_counted(made, tmp_path):
    source = Files(run_name(replace(TINY, seed=1)), made).record
    target = Files(run_name(replace(TINY, seed=9)), tmp_path).record
    target.parent.mkdir()
    target.write_text(source.read_text())
    with pytest.raises(RecordError, match="holds the record of"): read_record(target)


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
    from filelock import FileLock
    files = Files(run_name(TINY), tmp_path)
    files.lock.parent.mkdir()
    assert not is_running(run_name(TINY), tmp_path)
    with FileLock(files.lock):
        assert is_running(run_name(TINY), tmp_path)
        with pytest.raises(Busy, match="another process is computing this run"):
            record_run(TINY, tmp_path)
    assert not is_running(run_name(TINY), tmp_path)
    record_run(TINY, tmp_path)
    with pytest.raises(AlreadyRecorded): record_run(TINY, tmp_path, rerun=False)


def test_a_run_is_seen_to_run_by_those_who_may_only_read(tmp_path, monkeypatch):
    from filelock import FileLock
    from tce_nb import records
    files = Files(name := run_name(TINY), tmp_path)
    files.lock.parent.mkdir()
    def refuse(*_): raise PermissionError
    monkeypatch.setattr(records, "lock_of", refuse)
    with FileLock(files.lock): assert is_running(name, tmp_path)
    files.lock.touch()
    assert not is_running(name, tmp_path)


def test_a_damaged_record_is_set_aside_and_made_again(tmp_path):
    record_run(TINY, tmp_path)
    files = Files(run_name(TINY), tmp_path)
    whole = files.record.read_text()
    files.record.write_text(whole[:100])
    assert not recorded(run_name(TINY), tmp_path)
    record_run(TINY, tmp_path, rerun=False)
    assert json.loads(files.record.read_text())["history"]["test_accuracy"] == \
        json.loads(whole)["history"]["test_accuracy"]
    assert files.checkpoint.with_suffix(".record").read_text() == whole[:100]


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
    files = Files(run_name(TINY), tmp_path)
    files.checkpoint.parent.mkdir()
    files.checkpoint.write_bytes(b"rubbish")
    with pytest.warns(UserWarning, match="moved to .*damaged, starting again"):
        record_run(TINY, tmp_path)
    assert files.checkpoint.with_suffix(".damaged").read_bytes() == b"rubbish"
    assert recorded(run_name(TINY), tmp_path)


def test_a_checkpoint_that_cannot_be_read_now_is_kept(tmp_path, monkeypatch):
    from pathlib import Path
    checkpoint = Files(run_name(TINY), tmp_path).checkpoint
    checkpoint.parent.mkdir()
    train(replace(TINY, epochs=1), checkpoint=tmp_path/"other.pt")
    checkpoint.write_bytes((tmp_path/"other.pt").read_bytes())
    before = checkpoint.read_bytes()
    def fail(path): raise OSError(5, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(OSError, match="Input/output error"): record_run(TINY, tmp_path)
    assert checkpoint.read_bytes() == before


def test_an_unfinished_run_is_no_record():
    run = train(replace(TINY, epochs=1))
    run.history.clear()
    with pytest.raises(ValueError, match="run: has 0 of 1 epochs"): make_record(run)


def test_the_scale_is_read_off_the_configuration():
    for scale in ("paper", "cpu", "digits", "smoke"):
        assert scale_of(preset(scale, dataset="cifar10", loss="mse", eta=0.8, seed=4, hold_out=0.1)) == scale
        assert scale_of(preset(scale, dataset="cifar10", lr=0.3)) == "custom"


def test_the_results_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TCE_RESULTS", raising=False)
    assert results_folder(tmp_path/"a") == tmp_path/"a"
    monkeypatch.chdir(tmp_path)
    assert results_folder() == tmp_path/"results"
    monkeypatch.setenv("TCE_RESULTS", "elsewhere")
    assert results_folder() == tmp_path/"elsewhere"


def test_many_records_are_gathered(made, tmp_path):
    record = read_record(Files(run_name(replace(TINY, seed=1)), made).record)
    for seed in range(500):
        config = replace(TINY, seed=seed)
        write_record(dict(record, name=run_name(config), config=asdict(config)), tmp_path)
    frame = gather(tmp_path)
    assert len(frame) == 500 and frame.seed.nunique() == 500
    assert cells(frame, "last").n.item() == 500


def test_the_papers_numbers_as_printed():
    "Sums of the rows, added up by hand from the printed tables"
    table1 = paper_numbers("table1").pivot(index="method", columns="eta", values="accuracy")
    assert table1.loc["ce"].tolist() == [68.18, 61.16, 54.52, 44.08, 20.30]
    assert table1.loc["tce:2"].tolist() == [66.81, 64.37, 61.51, 52.09, 18.75]
    assert table1.loc["mae"].tolist() == [1.0] * 5
    table2 = paper_numbers("table2").pivot(index="method", columns=["dataset", "eta"], values="accuracy")
    assert table2.loc["tce:2"].tolist() == [99.74, 99.59, 98.76, 91.82, 88.40, 72.95, 97.09, 96.15, 90.44]
    assert table2.loc["mse", "cifar10"].tolist() == [92.15, 84.90, 63.30]
    dashes = paper_numbers("table2").query("accuracy.isna()")
    assert set(dashes.method) == {"mae"} and len(dashes) == 5
    fig3 = paper_numbers("fig3").set_index(["dataset", "method"])
    assert fig3.loc[("cifar100", "mse"), "epochs"] == 46.8294
    assert fig3.loc[("cifar10", "ce"), "accuracy_std"] == 0.362158
