"""Write the table of the current records into README.md, between its two marks.

From the project's root: make sync
"""
import re
import textwrap
from pathlib import Path

import pandas as pd

from tce_nb.report.paper import DEFAULT, TITLES, method_label
from tce_nb.report.results import (
    accuracy_table, accuracy_text, gain_texts, markdown_table, signed)
from tce_nb.run.records import gather

COLUMNS = [("cifar10", 0.4), ("cifar100", 0.4), ("mnist", 0.4), ("svhn", 0.4),
           ("cifar10", 0.8), ("cifar100", 0.8), ("cifar10", 0.0), ("cifar100", 0.0)]
HEAD = ["data, labels drawn at random", "our scale", "CE", method_label(DEFAULT), "gain",
        "the paper's gain"]
NOTE = ("Test accuracy in percent at each run's selected epoch, ± standard deviation (seeds). "
        "Gains are in points, paired over seeds, with their 95% interval, bold where it "
        "excludes zero.")


def readme_table(frame):
    "CE, TCE and the gain in the main columns of `gather` as Markdown, with the scale"
    frame = frame[frame.method.isin(["ce", DEFAULT])]  # at their best scale
    table = pd.concat([accuracy_table(frame, which) for which in ("table1", "table2")])
    plain, tamed = (table[(table.method == method) & (table.n > 0)].set_index(["dataset", "eta"])
                    for method in ("ce", DEFAULT))
    shown = [key for key in COLUMNS if key in plain.index and key in tamed.index]
    rows = [(f"{TITLES[key[0]]}, {key[1]:.0%}", row["size"], accuracy_text(plain.loc[key]),
             accuracy_text(row), " ".join(gain_texts(row)), signed(row.paper_gain))
            for key, row in tamed.loc[shown].iterrows()]
    return markdown_table(HEAD, rows, True)


def update_readme(path, frame):
    "Write the table of these runs; the text around the marks stays as it is"
    begin, end = "<!-- records -->", "<!-- end of records -->"
    parts = begin, readme_table(frame), textwrap.fill(NOTE, 80), end
    text = re.sub(f"(?s){begin}.*{end}", lambda _: "\n\n".join(parts),
                  Path(path).read_text(encoding="utf-8"))
    Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__": update_readme("README.md", gather())
