"""The code on the practical pages does what the pages say, in a process of its own."""
import os
import re
import shlex
import subprocess
import sys
from itertools import groupby

import pytest
from conftest import BIN, ROOT
from tce_nb.run.cli import make_parser

PAGES = sorted([*(ROOT/"nbs/start").glob("*.md"), *(ROOT/"nbs/reproduce").glob("*.md")])
USE = [page for page in PAGES if page.stem in ("use_it", "recipes", "trainers", "find_bad_labels")]
BLOCK = re.compile(r"^```(\{code-cell\} ipython3|python|bash)\n(?:---\n.*?^---\n|(?::[^\n]*\n)*)(.*?)^```$", re.M | re.S)
FREE = {"--dry-run", "--help", "status", "results"}  # start no training


def blocks(page):
    "Kind and text of a page's blocks of code, in order"
    return [("bash" if kind == "bash" else "python", code) for kind, code in BLOCK.findall(page.read_text())]


def commands(page):
    "The words of each `tce` command on a page"
    lines = [line for kind, code in blocks(page) if kind == "bash" for line in code.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line.split(" > ")[0], comments=True) for line in lines]
    return [words[1:] for words in split if words[:1] == ["tce"]]


def run(command, folder, **settings):
    "Run a command in a folder, with its results there"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TCE_RESULTS": str(folder/"results"),
                   "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **settings}
    result = subprocess.run(command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


def run_page(page, folder):
    "Run a page's blocks in order: Python between two shell blocks is one script"
    said = ""
    for kind, group in groupby(blocks(page), key=lambda block: block[0]):
        script = "\n".join(code for _, code in group)
        shell = [sys.executable, "-W", "error", "-c"] if kind == "python" else ["bash", "-euc"]
        said += run([*shell, script], folder)
    return said


def test_the_blocks_of_a_page_are_found():
    assert len(USE) == 4
    for page in USE:
        code = [code for kind, code in blocks(page)]
        shown = page.read_text().count("\n```{code-block}")  # not run: packages that the book does without
        assert len(code) == page.read_text().count("\n```") / 2 - shown >= 4
        assert sum("assert" in block for block in code) >= 2, page


@pytest.mark.parametrize("page", USE, ids=lambda page: page.stem)
def test_a_page_on_use_runs_as_one_script(page, tmp_path):
    assert run_page(page, tmp_path).strip()


def test_your_data_and_your_loss(tmp_path):
    said = run_page(ROOT/"nbs/reproduce/extend.md", tmp_path)
    assert "Dataset('mine', 200 training and 100 test images, 3 channels, 2 classes)" in said
    assert re.search(r"mine.npz +uniform_including_true +0\.2 +custom +180 +3 .*tce:1.5", said)
    assert len(list(tmp_path.glob("results/records/mine-tce1.5-*.json"))) == 1
    assert re.search(r"mine.py:gentle@[0-9a-f]{12} +\d", said) and "loss by epoch: " in said
    assert len(list(tmp_path.glob("results/records/digits-gentle-*.json"))) == 2


@pytest.mark.parametrize("page", [ROOT/"README.md", ROOT/"nbs/index.md", *PAGES], ids=lambda page: page.stem)
def test_every_command_on_a_page_is_understood(page, tmp_path):
    for words in commands(page):
        make_parser().parse_args(words)
        if FREE & set(words) and page.stem == "rerun": run([BIN/"tce", *words], tmp_path)
