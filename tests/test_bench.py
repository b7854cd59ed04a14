"""The benchmark: its loader on other systems, its goals, and the table that it prints."""
import json

import torch
from conftest import save_npz

from tce_nb.report import bench
from tce_nb.run.checkpoint import device_name


def test_the_usual_loader_works_where_processes_are_not_forked(tmp_path):
    loader = bench.plain_loader(save_npz(tmp_path/"x.npz", channels=3))
    loader.multiprocessing_context = "spawn"
    batches = iter(loader)
    images, labels = next(batches)
    assert images.shape == (40, 3, 32, 32) and sorted(labels.tolist()) == [0] * 20 + [1] * 20
    batches._shutdown_workers()


def test_every_goal_has_its_row(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "take_turns", lambda steps, seconds: {name: [1.0] * 5 for name in steps})
    monkeypatch.setattr(bench, "native_bfloat16", lambda: True)
    for name in ("our_loop", "plain_loader", "SideBySide", "_cutters"): monkeypatch.setattr(bench, name, FakeLoop)
    report = tmp_path/"bench.json"
    bench.main(0, report)
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    goals = {name: row.get("at_most", row.get("at_least")) for name, row in rows.items() if bench.goal_of(row)[0]}
    for words, goal in {"step, 1024 x 1000, class indices": 1.1, "step, 1024 x 1000, probabilities": 2, "memory, 1024 x 1000, label smoothing": 1.1,
                        "forward /": 4, "js /": 6, "bitempered /": 10, "loop, float32": 1.6, "loop, bfloat16": 2, "augmentation": 20,
                        "epoch of the trainer": 1.01}.items():
        assert [value for name, value in goals.items() if words in name] == [goal], words
    assert [sum("fastest kernel" in name and precision in name for name in rows) for precision in ("float32", "bfloat16")] == [1, 1]


class FakeLoop(dict):
    "What times nothing"
    def __init__(self, *arguments, **options): super().__init__(ours=None, theirs=None)
    def close(self): pass


def test_the_table_says_what_was_met_and_on_what(tmp_path, monkeypatch):
    (tmp_path/".venv").mkdir()
    (tmp_path/".venv/.seconds-test").write_text("900")
    monkeypatch.setattr(bench, "project_folder", lambda: tmp_path)
    rows = [*bench.duration_rows(), dict(name="a / b", ratio=1.25, low=1.2, high=1.3, at_most=1.1), dict(name="a / c", ratio=3.0, at_least=2)]
    text = bench.bench_markdown(dict(machine=bench.machine(), date="today", rows=rows))
    assert "| make test / 10 minutes | 1.50 |  | at most 1 | **missed** |" in text
    assert "| a / b | 1.25 | 1.20 to 1.30 | at most 1.1 | **missed** |\n| a / c | 3.00 |  | at least 2 | met |" in text
    assert f"Measured on {device_name(torch.device('cpu'))}, " in text
