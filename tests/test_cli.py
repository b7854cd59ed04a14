"""The command: clear words, right exit codes, nothing started by accident."""
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields, replace

import pandas as pd
import pytest
import torch

from conftest import TCE
from tce_nb.run import cli
from tce_nb.run.cli import main
from tce_nb.run.records import Files, record_run
from tce_nb.run.config import Config, preset, run_name
from tce_nb.run.plan import cost, plan

TINY = dict(train_per_class=8, test_per_class=4, epochs=2, device="cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A folder with two seeds of two losses, and their hold-out runs"
    folder = tmp_path_factory.mktemp("results")
    for job in plan("smoke", seeds=2, **TINY): record_run(job.config, folder)
    return str(folder)


@pytest.mark.parametrize("verb", ["run", "sweep", "results"])
def test_a_verb_has_examples_that_parse(verb, capsys):
    from tce_nb.run.cli import make_parser
    with pytest.raises(SystemExit) as ended: main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    examples = re.findall(r"^  tce (.*?)(?:\s+#.*|\s+>.*)?$", said.split("examples:")[1], re.M)
    assert len(examples) >= 2
    for example in examples: make_parser().parse_args(example.split())


OWN = """
class Unlucky:
    def __init__(self): raise KeyError("no")
"""


@pytest.mark.parametrize("arguments, message", [
    ("run --loss cee", "loss: got 'cee', expected one of ce, .*did you mean ce\\?"),
    ("run --eta 1.5", "eta: got 1.5, expected a number from 0 to 1"),
    ("run --lr inf", "lr: got inf, expected a number >= 0"),
    ("run --dataset nothing.npz", "No such file or directory: 'nothing.npz'"),
    ("run --hold-out 1.5", "hold_out: got 1.5, expected a share below 1"),
    ("sweep --preset few --dataset cifar", "dataset: got 'cifar'.*did you mean cifar10"),
    ("sweep --preset few --loss tec", "loss: got 'tec'.*did you mean tce\\?"),
    ("sweep --preset few --loss tce:x", "loss: got 'tce:x', expected a number after 'tce:'"),
    ("sweep --preset few --eta -1", "eta: got -1.0, expected a number from 0 to 1"),
    ("sweep --preset few --seeds 0", "seeds: got 0, expected an int >= 1"),
    ("sweep --preset few --set epoch=3", "epoch: not a field of Config.*did you mean epochs\\?"),
    ("run --optimizer adam", "lr: got none with optimizer adam, expected one, such as 0.001"),
    ("sweep --preset few --set optimizer=adam", "lr: got none with optimizer adam"),
    ("results --loss tec:1.5", "loss: got 'tec', .*did you mean tce\\?"),
    ("run --noise pair_flip", "--noise: got pair_flip without noise, expected --eta above 0"),
    ("run --noise transition:T.npy --eta 1", "No such file or directory: .*T.npy'"),
    ("sweep --preset few --set epochs=many", "epochs: got 'many', expected an int"),
    ("sweep --preset smoke --ray nowhere:1", "ray: no cluster at 'nowhere:1'"),
    ("run --dataset cifar", "dataset: got 'cifar'.*did you mean cifar10"),
    ("sweep --preset digits --noise class_dependent", "noise: got class_dependent with digits, expected cifar10 or"),
    ("run --loss exit.py:Loss", "loss: got exit.py:Loss, expected a class or a function .* SystemExit: 3"),
    ("run --loss mine.py:Los", "loss: got mine.py:Los, expected a class or a function .* KeyError: 'Los'"),
    ("sweep --preset smoke --loss mine.py:Unlucky", "loss: got mine.py:Unlucky, expected .* ends with KeyError: 'no'"),
    ("sweep --preset smoke --loss ce mine.py", "loss: got 'mine.py', expected one of .*FILE.py:NAME"),
    ("run --dataset broken.npz --dry-run", "broken.npz: no readable .npz file"),
])
def test_a_mistake_is_one_line_and_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"broken.npz").write_text("PK rubbish")
    (tmp_path/"exit.py").write_text("raise SystemExit(3)")
    (tmp_path/"mine.py").write_text(OWN)
    assert main([*arguments.split(), "--results", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1 and said.startswith("tce ")
    assert not list(tmp_path.glob("records/*"))


@pytest.mark.parametrize("words", ["--threads 0", "--workers -1", "--runs-per-gpu 0", "--cpus-per-run 0"])
def test_a_number_of_nothing_is_refused(words, capsys):
    with pytest.raises(SystemExit): main(["sweep", "--preset", "smoke", "--dry-run", *words.split()])
    assert re.search(f"argument {words.split()[0]}: invalid positive (int|float) value: '(0|-1)'", capsys.readouterr().err)


@pytest.mark.parametrize("native", [True, False])
def test_a_dry_run_says_what_bfloat16_would_gain(tmp_path, capsys, monkeypatch, native):
    monkeypatch.setattr(cli, "native_bfloat16", lambda: native)
    monkeypatch.setattr(cli, "measure_speed", lambda config, *_: {"float32": 200, "bfloat16": 300}[config.precision])
    assert main(["run", "--device", "cpu", "--dry-run", "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "at 200 images/s" in said and ("precision=bfloat16: 300 images/s, 1.5 times as fast" in said) == native


@pytest.mark.parametrize("arguments, message", [
    *[(line, "error:") for line in ("", "swep", "sweep", "sweep --preset papr", "sweep --preset few --threads 1.5")],
    ("run --ephochs 3", "unrecognized arguments: --ephochs 3"), ("run --eta 40%", "argument --eta: invalid float value: '40%'"),
    ("sweep --preset few --set epochs", "argument --set: invalid FIELD=VALUE value: 'epochs'")])
def test_a_wrong_option_is_told_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended: main(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_named(capsys):
    assert main(["run", "--results", "/proc/nowhere"]) == 2
    assert re.search("tce run: error: .*No such file or directory: '/proc/nowhere", capsys.readouterr().err)


def test_a_gpu_that_is_not_there_is_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "--device", "cuda", "--results", str(tmp_path)]) == 2
    assert "device: got 'cuda', but PyTorch finds no GPU" in capsys.readouterr().err


def test_the_command_without_a_script_on_the_path(tmp_path):
    command = [sys.executable, "-m", "tce_nb.run.cli", "results", "--results", str(tmp_path), "--loss", "tec"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("tce results: error: ")


def test_a_dry_run_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TCE_DATA", str(tmp_path))
    assert main(["sweep", "--preset", "paper", "--dry-run", "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("waiting") == 588 and "588 runs, 588 to do: about" in said and "images/s" in said
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "measure_speed", lambda config, threads: 1.0)
    def seconds():
        assert main([*"sweep --preset smoke --loss ce --seeds 1 --dry-run --results".split(), str(tmp_path)]) == 0
        hours, minutes, seconds = re.search(r"waiting +(\d+):(\d+):(\d+)", capsys.readouterr().out).groups()
        return 3600 * int(hours) + 60 * int(minutes) + int(seconds)
    job = plan("smoke", methods=["ce"], seeds=1)[0]
    files, whole = Files(job.name, tmp_path), int(cost(job.config))
    assert seconds() == whole
    files.progress.parent.mkdir()
    files.progress.write_text(json.dumps(dict(epoch=3, epochs=4, test_accuracy=0.5, seconds=1.0)))
    assert seconds() == whole // 4


def test_status_counts_what_there_is(made, capsys):
    assert main(["status", "--results", made]) == 0
    assert capsys.readouterr().out == "other: 6 done\n"


def test_status_of_a_run_under_way(tmp_path, capsys):
    from tce_nb.run.records import lock_of
    name = run_name(CONFIG)
    Files(name, tmp_path).record.parent.mkdir()
    with lock_of(name, tmp_path):
        Files(name, tmp_path).progress.write_text(json.dumps(dict(epoch=1, epochs=2, test_accuracy=0.5, seconds=3)))
        held = subprocess.run([*TCE, "status", "--results", tmp_path], capture_output=True, text=True)
    assert held.stdout == f"other: 1 running\n  running {name}: epoch 1/2, test 50.00%, 0:00:03 left\n"


def test_results_as_tables_and_as_csv(made, capsys):
    def said(*form):
        assert main(["results", "--results", made, "--reading", "last", *form]) == 0
        return capsys.readouterr().out
    text, frame = said(), pd.read_csv(__import__("io").StringIO(said("--csv")))
    assert set(frame.method) == {"ce", "tce:1.5"} and frame.n.tolist() == [2, 2]
    shown = f"{100 * frame['mean'][0]:.2f} ± {100 * frame['std'][0]:.2f} (2)"
    assert shown in text and re.search(r"digits +uniform_including_true +0\.4 +custom +80 +2 +batch_size 16, depth 8 +ce +", text)
    assert said("--dataset", "mnist") == ""
    assert "tce:1.5" not in said("--loss", "ce") and " ce " in said("--loss", "ce", "--eta", "0.4")
    assert "tce:1.5" in said("--loss", "tce")
    record_run(other := preset("smoke", alpha=3.0, eta=0.4, seed=1, **TINY), made)
    try: assert "tce:3" in said("--loss", "tce")  # not only the paper's exponents
    finally: Files(run_name(other), made).record.unlink()
    assert said("--eta", "0.9") == said("--preset", "few") == ""


def test_results_name_what_they_skip(made, capsys):
    assert main(["results", "--results", "nowhere"]) == 0
    assert "no runs are recorded here" in capsys.readouterr().err
    rubbish = Files("rubbish", made).record
    rubbish.write_text("{")
    with pytest.warns(UserWarning, match="skipped 1 file.*\n.*rubbish.json"): main(["results", "--results", made])
    rubbish.unlink()


RUN = ["run", "--epochs", "2", "--train-per-class", "8", "--test-per-class", "4", "--seed", "1"]
CONFIG = preset("smoke", **{**TINY, "seed": 1, "device": "auto"})


def test_one_run_and_again(tmp_path, capfd):
    arguments = [*RUN, "--results", str(tmp_path)]
    assert main(arguments) == 0
    assert "done digits-tce1.5-eta0-train-seed1" in capfd.readouterr().err
    files = Files(run_name(CONFIG), tmp_path)
    first = json.loads(files.record.read_text())
    assert main(arguments) == 0
    assert capfd.readouterr().err == f"1 done\nrecords: {tmp_path}/records\n"
    assert json.loads(files.record.read_text()) == first


def test_a_cell_whose_runs_diverged_says_so(tmp_path, capsys):
    lost = replace(CONFIG, lr=1e30, loss="mse")
    record_run(lost, tmp_path)
    assert main(["results", "--results", str(tmp_path), "--reading", "last"]) == 0
    assert re.search(r"mse +1 diverged", capsys.readouterr().out)


def test_an_exponent_is_the_same_however_it_is_written(tmp_path, capsys):
    record_run(replace(CONFIG, loss="tce", alpha=1.0), tmp_path)
    for word in ("tce:1", "tce:1.0", "tce"):
        assert main(["results", "--results", str(tmp_path), "--loss", word, "--reading", "last"]) == 0
        assert " tce:1 " in capsys.readouterr().out


def test_a_loss_of_ones_own_is_found_in_the_results(tmp_path, capsys):
    mine = tmp_path/"mine.py"
    mine.write_text("from torch.nn import CrossEntropyLoss as Mine")
    for loss in ("ce", f"{mine}:Mine"): record_run(replace(CONFIG, loss=loss), tmp_path)
    for word in ("mine.py:Mine", f"{mine}:Mine"):
        assert main(["results", "--results", str(tmp_path), "--loss", word, "--reading", "last"]) == 0
        said = capsys.readouterr().out
        assert " ce " not in said and re.search(r"mine.py:Mine@[0-9a-f]{12} +\d", said)


def test_every_field_has_its_help(capsys):
    with pytest.raises(SystemExit): main(["run", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for field in fields(Config): assert " ".join(field.metadata["help"].split()) in said


def test_a_run_of_few_holds_out_its_own_images():
    from tce_nb.run.cli import _run_config, make_parser
    def config(line): return _run_config(make_parser().parse_args(["run", *line.split()]))
    assert config("--preset few --dataset cifar10 --loss ce --eta 0.4 --seed 1") == preset(
        "few", dataset="cifar10", loss="ce", eta=0.4, seed=1)
    assert config("--preset few --dataset cifar10").hold_out == 0.1
    assert config("--preset paper --dataset cifar100 --hold-out 5000").hold_out == 5000
    assert config("--preset paper --dataset cifar100").hold_out == 0


def test_a_terminal_gets_a_live_table(tmp_path):
    shown = b""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="150", LINES="40")
        os.execv(TCE[0], [*TCE, *RUN, "--epochs", "60", "--results", str(tmp_path)])
    while True:
        try: part = os.read(terminal, 4096)
        except OSError: break
        if not part: break
        shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    text = shown.decode()
    assert "1 running" in text and re.search(r"epoch \d+/60, test \d+\.\d\d%", text) and "1 done" in text
    assert re.search(r"done digits\S+: test \d+\.\d\d% at epoch 60", text)
    assert text.count("Traceback") == 0


def test_without_the_extras_it_says_what_to_install():
    code = ("import sys; sys.modules['pandas'] = None\n"
            "from tce_nb.run.cli import main; main(['status'])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1 and 'pip install "tce_nb[run]"' in result.stderr
    assert "Traceback" not in result.stderr
