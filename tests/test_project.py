"""The project as a whole: notebooks, library, package and commands agree."""
import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from conftest import BIN, ROOT, tracked_files
from made_up import make_up
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tce_nb.run.plan import plan

NOTEBOOKS = sorted(name for name in tracked_files() if name.endswith(".ipynb"))

def run(*command, **kwargs):
    "Run a command, showing what it printed if it fails"
    result = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, **kwargs)
    assert result.returncode == 0, result.stdout
    return result.stdout


def contents(folder, names):
    return {name: (folder/name).read_bytes() for name in names if (folder/name).exists()}


def read_settings():
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT/"settings.ini")
    return settings["DEFAULT"]


@pytest.mark.parametrize("command", ["nbdev_clean", "nbdev_export"])
def test_notebooks_and_library_are_in_sync(clone, command):
    before = contents(clone, tracked_files())
    run(BIN/command, cwd=clone)
    after = contents(clone, tracked_files())
    assert [name for name in before if after[name] != before[name]] == []
    generated = {str(p.relative_to(clone)) for p in (clone/"tce_nb").rglob("*.py")}
    assert generated == {n for n in before if re.fullmatch(r"tce_nb/.*\.py", n)}


def test_the_readme_shows_the_committed_records(clone):
    before = (clone/"README.md").read_text()
    environment = {k: v for k, v in os.environ.items() if k != "TCE_RESULTS"}
    run(sys.executable, "nbs/make_readme.py", cwd=clone, env=environment)
    assert (clone/"README.md").read_text() == before, "make sync writes the table of the records"
    assert "| CE | " in before


# the book runs every notebook with the committed records; these show them, so they are run without any and with made-up ones
READERS = [name for name in NOTEBOOKS if re.match(r"nbs/(start|paper|beyond)/", name)]


@pytest.fixture(scope="session", params=["none", "made up"])
def records(request, tmp_path_factory):
    "A folder of results: empty, or with made-up records of the paper's cells at two scales"
    folder = tmp_path_factory.mktemp("records")
    if request.param != "none": make_up([*plan("short", seeds=2), *plan("few", seeds=2)], folder)
    return folder


@pytest.mark.parametrize("notebook", READERS)
def test_a_page_shows_whatever_records_there_are(notebook, records):
    environment = {**os.environ, "TCE_RESULTS": str(records)}
    assert "Success." in run(BIN/"nbdev_test", "--path", notebook, "--n_workers", 0, cwd=ROOT, env=environment)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebook_is_kept_tidy(notebook):
    cells = json.loads((ROOT/notebook).read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells), "outputs belong to the book"
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert [line for cell in code for line in cell.split("\n") if len(line) > 79] == []


def test_types_check():
    run(sys.executable, "-m", "mypy", cwd=ROOT)


def test_ruff_finds_nothing():
    run(sys.executable, "-m", "ruff", "check", cwd=ROOT)


def test_versions_agree():
    import tce_nb
    about = read_settings()
    assert tce_nb.__version__ == about["version"] == distribution("tce_nb").version
    assert f"## {about['version']}" in (ROOT/"CHANGELOG.md").read_text()


def pins():
    "The version that constraints.txt pins here, by package"
    lines = (ROOT/"constraints.txt").read_text().splitlines()
    needs = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {canonicalize_name(need.name): str(need.specifier).removeprefix("==")
            for need in needs if need.marker is None or need.marker.evaluate()}


def test_what_is_installed_is_what_is_pinned():
    pinned = pins()
    for name, version in {"torch": "2.13.0", "torchvision": "0.28.0", "nbdev": "2.4.14",
                          "jupyter-book": "1.0.4.post1", "papermill": "2.7.0"}.items():
        assert pinned[name] == version
    needed, queue = set(), ["tce_nb"]
    while queue:  # everything the dev extra pulls in
        name = canonicalize_name(queue.pop())
        if name in needed: continue
        needed.add(name)
        for need in map(Requirement, distribution(name).requires or []):
            extras = ("dev", "book", "run", "ray", "trainers") if name == "tce-nb" else ("",)
            if any(need.marker is None or need.marker.evaluate({"extra": extra})
                   for extra in extras): queue.append(need.name)
    installed = {name: distribution(name).version.split("+")[0] for name in needed - {"tce-nb"}}
    differing = {name: (version, pinned.get(name)) for name, version in installed.items()
                 if version != pinned.get(name)}
    assert differing == {}


def link_torch(site):
    "Put torch, and only what torch needs, into a site-packages folder"
    queue, seen = ["torch"], set()
    while queue:
        name = queue.pop()
        if canonicalize_name(name) in seen: continue
        seen.add(canonicalize_name(name))
        dist = distribution(name)
        queue += [need.name for need in map(Requirement, dist.requires or [])
                  if need.marker is None or need.marker.evaluate({"extra": ""})]
        for top in {Path(f).parts[0] for f in dist.files if ".." not in Path(f).parts}:
            source = Path(dist.locate_file(top))
            if top != "__pycache__" and source.exists() and not (site/top).exists():
                (site/top).symlink_to(source)
    return seen


TRAIN = """
import torch
from tce_nb import TamedCrossEntropyLoss, uniform_including_true

torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
noisy = uniform_including_true(y, 0.4, 3, seed=0)
net = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
criterion = TamedCrossEntropyLoss()
losses = []
for step in range(30):
    loss = criterion(net(x), noisy.labels)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
accuracy = (net(x).argmax(1) == y).float().mean().item()
assert losses[-1] < losses[0] and accuracy > 0.8, (losses, accuracy)
print("trained")
"""


def test_the_wheel_needs_torch_alone(clone, tmp_path):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, clone)
    wheel, = tmp_path.glob("*.whl")
    venv = tmp_path/"fresh"
    run(sys.executable, "-m", "venv", venv)
    python = venv/"bin"/"python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    allowed = link_torch(site)
    run(python, "-m", "pip", "install", "--no-index", "--find-links", tmp_path, wheel)
    names = json.loads(run(python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"))
    extra = {canonicalize_name(d["name"]) for d in names} - allowed
    assert extra <= {"tce-nb", "pip", "setuptools"}
    assert (site/"tce_nb"/"py.typed").exists()
    assert (site/"tce_nb"/"experiments"/"run.ipynb").exists()
    bare = subprocess.run([str(venv/"bin"/"tce"), "status"], capture_output=True, text=True)
    assert bare.returncode == 1 and 'pip install "tce_nb[run]"' in bare.stderr
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert "trained" in run(python, "-c", TRAIN, cwd=tmp_path, env=environment)


def test_make_help_lists_every_target(clone):
    listed = run("make", "help", cwd=clone)
    targets = re.findall(r"^([a-z]+):", (clone/"Makefile").read_text(), re.M)
    assert set(targets) >= {"book", "test", "bench"}
    assert all(f"make {target}" in listed for target in targets)


@pytest.mark.parametrize("script, message", [
    (None, "not found: install Python 3.10"),
    ('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit\nexit 1\n',
     "Python 3.8.1 is too old: Python 3.10"),
    ('#!/bin/sh\ncase "$2" in *venv*) exit 1;; esac\n', "has no venv or pip"),
])
def test_make_says_what_is_missing(clone, tmp_path, script, message):
    python = tmp_path/"python-for-this-test"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    result = subprocess.run(["make", "book", f"PYTHON={python}"], cwd=clone,
                            capture_output=True, text=True)
    assert result.returncode != 0 and message in result.stderr
    assert not (clone/".venv").exists()


def test_an_up_to_date_venv_is_not_rebuilt(clone):
    (clone/".venv").mkdir()
    (clone/".venv/.ready").touch()
    plan = run("make", "--dry-run", "test", cwd=clone)
    assert "pytest" in plan and "pip install" not in plan
    os.utime(clone/".venv/.ready", (0, 0))
    assert "pip install" in run("make", "--dry-run", "test", cwd=clone)


def test_nothing_private_is_committed():
    "No path of the machine it was written on"
    home = re.compile(rb"/(home|root|work|Users)/[a-z]")
    names = [n for n in tracked_files() if Path(n).suffix not in (".png", ".npz")]
    found = [n for n in names if home.search((ROOT/n).read_bytes()) and n != "tests/test_project.py"]
    assert found == []
