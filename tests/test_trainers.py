"""The page on trainers, with the real packages: its code runs here, offline, on tiny networks."""
import copy
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from tce_nb import TamedCrossEntropyLoss
from tce_nb.run.data import import_torchvision

import_torchvision()  # timm and Lightning import it: here, also beside a build of PyTorch that does not match

PAGE = (ROOT/"nbs/start/trainers.md").read_text()
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
CODE = re.compile(r"^```(?:\{code-block\} python|\{code-cell\} ipython3)\n(.*?)^```$", re.M | re.S)
CODES = {title: CODE.findall(text) for title, text in SECTION.findall(PAGE)}
TCE = TamedCrossEntropyLoss(alpha=1.5)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    "No connection is made, and what is written goes into a folder that is thrown away"
    def refuse(self, address): raise AssertionError(f"a connection to {address}")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"): monkeypatch.setenv(name, "1")
    monkeypatch.chdir(tmp_path)


def page(title, *, block=0, **names):
    "Run one block of the page's code, with these names, and return all that it then knows"
    space = {"torch": torch, "nn": nn, "TamedCrossEntropyLoss": TamedCrossEntropyLoss, "__name__": "page", **names}
    exec(CODES[title][block], space)
    return SimpleNamespace(**space)


def points():
    "64 points of four classes, and a linear network that knows nothing of them"
    torch.manual_seed(0)
    centres = 3 * torch.randn(4, 8)
    labels = torch.arange(64) % 4
    return centres[labels] + torch.randn(64, 8), labels, nn.Linear(8, 4)


def step_by_hand(net, loss, lr=0.1):
    "The network after one step of plain SGD on this loss of it"
    after = copy.deepcopy(net)
    after.zero_grad()
    loss(after).backward()
    torch.optim.SGD(after.parameters(), lr=lr).step()
    return after


def assert_same_weights(net, other):
    for a, b in zip(net.parameters(), other.parameters(), strict=True): assert_close(a, b)


def assert_learned(net, before, x, labels, predict=lambda net, x: net(x)):
    "Its weights changed, and it knows more of the labels it was trained on"
    def accuracy(net): return (predict(net, x).argmax(1) == labels).float().mean().item()
    assert any((a != b).any() for a, b in zip(net.parameters(), before.parameters(), strict=True))
    assert accuracy(net) > max(0.9, accuracy(before))


def test_lightning_reports_our_loss_and_accumulates_the_whole_batch(tmp_path):
    import lightning
    x, labels, net = points()
    before = copy.deepcopy(net)
    loader = DataLoader(TensorDataset(x, labels), batch_size=16)
    quiet = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False, default_root_dir=tmp_path)

    module = page("Lightning").Classifier(net)
    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, **quiet)
    trainer.fit(module, loader)
    assert trainer.global_step == 1
    assert_close(trainer.callback_metrics["train_loss"], TCE(before(x[48:]), labels[48:]))  # of the last batch
    assert_same_weights(net, step_by_hand(before, lambda net: TCE(net(x), labels)))

    lightning.Trainer(max_epochs=15, **quiet).fit(module, loader)
    assert_learned(net, before, x, labels)


@pytest.fixture
def sentences():
    "Eight sentences of different lengths, and a small BERT that labels their tokens"
    from transformers import BertConfig, BertForTokenClassification
    words = torch.randint(1, 20, (8, 12))
    labels = words % 3
    length = torch.tensor([12, 3, 7, 1, 12, 5, 2, 9])
    labels[torch.arange(12) >= length[:, None]] = -100
    net = BertForTokenClassification(BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return words, labels, net


def hugging_face(net, words, labels, compute_loss, epochs=1, lr=0.1, adam=False, **settings):
    "Train as the page does, with our optimizer; return the trainer's own report"
    from transformers import TrainingArguments
    data = [dict(input_ids=w, labels=y) for w, y in zip(words, labels)]
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(net.parameters(), lr=lr)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=epochs,
        max_grad_norm=0, lr_scheduler_type="constant", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_strategy="no", **settings)
    return page("Hugging Face", block=1, net=net, arguments=arguments, data=data, compute_loss=compute_loss,
                optimizers=(optimizer, None)).trainer.train()


def test_hugging_face_accumulates_the_mean_over_all_tokens(sentences):
    words, labels, net = sentences
    before = copy.deepcopy(net)
    compute_loss = page("Hugging Face").compute_loss
    def whole(net): return TCE(net(input_ids=words).logits.movedim(-1, 1), labels)
    right = step_by_hand(before, whole)
    report = hugging_face(net, words, labels, compute_loss)
    assert report.global_step == 1 and report.training_loss == pytest.approx(whole(before).item(), rel=1e-5)
    assert_same_weights(net, right)
    assert_close(compute_loss(before(input_ids=words), labels), whole(before))  # no count: of this batch

    smoothed = copy.deepcopy(before)  # the trainer's label smoothing does not reach our loss
    hugging_face(smoothed, words, labels, compute_loss, label_smoothing_factor=0.5)
    assert_same_weights(smoothed, right)


def test_hugging_face_does_not_divide_a_mean(sentences):
    words, _, net = sentences
    labels, before = words % 3, copy.deepcopy(net)  # every token has a label
    right = step_by_hand(net, lambda net: TCE(net(input_ids=words).logits.movedim(-1, 1), labels))
    def mean(outputs, labels, num_items_in_batch=None): return TCE(outputs.logits.movedim(-1, 1), labels)
    hugging_face(net, words, labels, mean)
    for a, b, c in zip(net.parameters(), right.parameters(), before.parameters(), strict=True):
        assert_close(a - c, 4 * (b - c), rtol=1e-3, atol=1e-6)  # four batches


def test_hugging_face_learns(sentences):
    words, labels, net = sentences
    before = copy.deepcopy(net)
    hugging_face(net, words, labels, page("Hugging Face").compute_loss, epochs=60, lr=0.02, adam=True)
    assert_learned(net, before, words, labels[labels != -100], lambda net, w: net(input_ids=w).logits[labels != -100])


def test_accelerate_accumulates_the_whole_batch():
    from accelerate import Accelerator
    x, labels, net = points()
    before = copy.deepcopy(net)
    names = dict(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4), criterion=TCE, net=net,
                 loader=DataLoader(TensorDataset(x, labels), batch_size=16),
                 optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    first = page("Accelerate", **names)
    assert_close(first.loss, TCE(before(x[48:]), labels[48:]))
    assert_same_weights(net, step_by_hand(before, lambda net: TCE(net(x), labels)))
    for _ in range(50): page("Accelerate", **names)
    assert_learned(net, before, x, labels)


def test_accelerate_sums_where_labels_are_ignored():
    from accelerate import Accelerator
    x, labels, net = points()
    labels[4:32] = -100
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    names = dict(net=net, accelerator=accelerator, count=(labels != -100).sum(),
                 total=TamedCrossEntropyLoss(alpha=1.5, reduction="sum"))
    for part in torch.arange(64).split(32):
        accelerator.backward(page("Accelerate", block=1, x=x[part], labels=labels[part], **names).loss)
    assert_close(net.weight.grad, torch.autograd.grad(TCE(net(x), labels), net.weight)[0])


def test_skorch_takes_alpha_and_our_loss_is_its_loss():
    x, labels, net = points()
    before = copy.deepcopy(net)
    model = page("skorch", Net=lambda: copy.deepcopy(net)).model
    model.set_params(batch_size=-1, verbose=0).fit(x.numpy(), labels.numpy())
    assert model.criterion_.alpha == 1.5
    assert model.history[0, "train_loss"] == pytest.approx(TCE(before(x), labels).item(), rel=1e-5)
    one = step_by_hand(before, lambda net: TCE(net(x), labels), lr=model.lr)
    assert model.history[1, "train_loss"] == pytest.approx(TCE(one(x), labels).item(), rel=1e-5)
    assert_learned(model.module_, before, x, labels)
    assert_close(torch.tensor(model.predict_proba(x.numpy())), model.module_(x).softmax(1))  # softmax is known
    assert model.set_params(criterion__alpha=0.5).initialize().criterion_.alpha == 0.5


def test_timm_mixes_labels_and_our_loss_takes_them():
    import timm.loss
    np.random.seed(0)  # timm draws its mixtures there
    labels = torch.arange(16) % 4
    images = torch.randn(4, 3, 32, 32)[labels] + 0.3 * torch.randn(16, 3, 32, 32)
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    before = copy.deepcopy(net)
    mixed = page("timm", images=images.clone(), labels=labels, net=net, criterion=TCE)
    assert mixed.target.shape == (16, 4) and ((mixed.target > 0).sum(1) > 1).all()  # smoothed, too
    with torch.no_grad(): logits = net(mixed.images)
    terms = torch.stack([TamedCrossEntropyLoss(alpha=1.5, reduction="none")(logits, torch.full((16,), k))
                         for k in range(4)], 1)
    assert_close(mixed.loss.detach(), (mixed.target * terms).sum(1).mean())
    assert_close(TamedCrossEntropyLoss(alpha=0)(logits, mixed.target),
                 timm.loss.SoftTargetCrossEntropy()(logits, mixed.target))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        page("timm", images=images.clone(), labels=labels, net=net, criterion=TCE).loss.backward()
        optimizer.step()
    assert_learned(net, before, images, labels)


def test_fastai_is_not_in_the_extra_as_the_page_says():
    needs, = re.findall("^trainers_requirements = (.*)$", (ROOT/"settings.ini").read_text(), re.M)
    assert needs == "accelerate lightning skorch timm transformers" and "fastai is not part of our tests" in PAGE


DEVICE = """
import sys, torch, torch.distributed as dist
from tce_nb import TamedCrossEntropyLoss
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
x, labels, net = torch.load(f"{folder}/all.pt", weights_only=False)
net = torch.nn.parallel.DistributedDataParallel(net)
total, mean = TamedCrossEntropyLoss(alpha=1.5, reduction="sum"), TamedCrossEntropyLoss(alpha=1.5)
mine = slice(32 * rank, 32 * rank + 32)
PAGE
for name, loss in (("share", share_of_mean), ("mean", mean)):
    net.zero_grad()
    loss(net(x[mine]), labels[mine]).backward()
    if rank == 0: torch.save(net.module.weight.grad, f"{folder}/{name}.pt")
dist.destroy_process_group()
"""


def test_two_devices_have_the_gradient_of_one(tmp_path):
    x, labels, net = points()
    labels[4:32] = -100  # the first device has 4 labels, the second 32
    torch.save((x, labels, net), tmp_path/"all.pt")
    script = DEVICE.replace("PAGE", CODES["Many devices"][0])
    children = [subprocess.Popen([sys.executable, "-c", script, str(rank), str(tmp_path)],
                                 env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}) for rank in range(2)]
    assert [child.wait(timeout=300) for child in children] == [0, 0]
    right, = torch.autograd.grad(TCE(net(x), labels), net.weight)
    share, mean = (torch.load(tmp_path/f"{name}.pt") for name in ("share", "mean"))
    assert_close(share, right)
    assert not torch.allclose(mean, right, rtol=0.1)
