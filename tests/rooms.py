"""The rooms of the package: who imports whom, how many lines, which names."""
import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {  # a module imports only what stands before it; a room, only rooms above it
    "tce_nb": ["arguments", "losses", "robust_losses", "registry", "noise", "labels"],
    "tce_nb.run": ["config", "data", "resnet", "checkpoint", "train", "records", "plan", "sweep", "cli"],
    "tce_nb.report": ["paper", "results", "figures", "claims", "bench", "book"],
}
ORDER = [f"{room}.{name}" for room, names in ROOMS.items() for name in names]


def path_of(module):
    "The file of a module"
    return ROOT/(module.replace(".", "/") + ".py")


def modules():
    "All modules of the package that were written in a notebook"
    names = (p.relative_to(ROOT).with_suffix("") for p in (ROOT/"tce_nb").rglob("*.py"))
    return sorted(".".join(n.parts) for n in names if n.name not in ("__init__", "_modidx"))


def imports(source, module=""):
    "The modules of this package that a source imports, inside functions too"
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[:-node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in ORDER}


def public(module):
    "The names of a module's `__all__`"
    for node in ast.parse(path_of(module).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def lines(path): return len(path.read_text().splitlines())


def stats():
    "Lines and public names per module and room"
    total = [0, 0]
    for room, names in ROOMS.items():
        counts = [(name, lines(path_of(f"{room}.{name}")), len(public(f"{room}.{name}"))) for name in names]
        for name, size, shown in counts: print(f"  {room + '.' + name:28}{size:6,} lines{shown:4} public names")
        size, shown = (sum(column) for column in list(zip(*counts))[1:])
        print(f"{room:30}{size:6,} lines{shown:4} public names")
        total = [total[0] + size, total[1] + shown]
    print(f"{'library':30}{total[0]:6,} lines{total[1]:4} public names")
    print(f"{'tests':30}{sum(map(lines, (ROOT/'tests').glob('*.py'))):6,} lines")


if __name__ == "__main__": stats()
