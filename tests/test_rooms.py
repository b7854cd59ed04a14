"""Use knows nothing of run, run knows nothing of report: the import graph says so."""
import json

import pytest
from rooms import ORDER, ROOMS, ROOT, imports, lines, modules, path_of, public


def test_every_module_has_its_room():
    assert modules() == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_stands_before_it(module):
    found = imports(path_of(module).read_text(), module)
    assert found <= set(ORDER[:ORDER.index(module)]), f"{module} imports {found}"


def test_an_import_inside_a_function_counts():
    source = "def f():\n    from ..report import claims\n    import tce_nb.run.train"
    assert imports(source, "tce_nb.run.sweep") == {"tce_nb.report.claims", "tce_nb.run.train"}
    assert imports("from .data import load", "tce_nb.run.train") == {"tce_nb.run.data"}


def test_an_experiment_knows_no_report():
    cells = json.loads((ROOT/"nbs/experiments/run.ipynb").read_text())["cells"]
    source = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    assert not any(name.startswith("tce_nb.report") for name in imports(source))


def test_the_public_names_are_few_and_say_what_they_do():
    names = [(module, name) for module in ORDER for name in public(module)]
    assert 50 < len(names) < 100 and len({name for _, name in names}) == len(names)
    import importlib
    for module, name in names:
        value = getattr(importlib.import_module(module), name)
        assert not callable(value) or value.__doc__, f"{module}.{name} has no docstring"


def test_the_library_grows_no_more():
    assert sum(lines(path_of(module)) for module in ORDER) <= 7350  # the goal is 6,000
    assert list(ROOMS) == ["tce_nb", "tce_nb.run", "tce_nb.report"]
