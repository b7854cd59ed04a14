"""What several tests share."""
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SKIP = {".venv", "_build", ".pytest_cache", ".mypy_cache", "__pycache__", ".hypothesis", "tce_nb.egg-info"}


def tracked_files():
    "The project's files as git knows them, whether or not committed yet"
    if not (ROOT/".git").exists(): return sorted(
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and not SKIP & set(p.parts))
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT/name).is_file()]


@pytest.fixture
def clone(tmp_path):
    "A copy of the project in a folder with a space in its name"
    folder = tmp_path/"a clone"
    for name in tracked_files():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, folder/name)
    return folder
