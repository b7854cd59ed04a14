"""The benchmark on other machines: processes that are not forked, and GPUs."""
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


def test_a_report_names_the_processor_of_the_trainer(monkeypatch):
    cpu = device_name(torch.device("cpu"))
    assert bench.DEVICE != "cpu" or bench.machine()["device"] == cpu
    monkeypatch.setattr(bench, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert bench.machine()["device"] == f"a GPU (the trainer on {cpu})"
