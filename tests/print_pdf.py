"""Print a page into a PDF: python print_pdf.py PAGE.html OUT.pdf"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main(page, out):
    "Let Chromium print; it waits until the formulas are set"
    chrome = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)
    if not chrome: sys.exit("make pdf: no Chromium or Chrome found; install one, or name it: CHROME=/path make pdf")
    subprocess.run([chrome, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000",
                    "--no-pdf-header-footer", f"--print-to-pdf={out}", Path(page).absolute().as_uri()],
                   check=True, stderr=subprocess.DEVNULL)
    print(f"The book is printed: {out} ({Path(out).stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__": main(*sys.argv[1:])
