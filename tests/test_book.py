"""The book builds without a warning, and its pages are what readers expect."""
import re
from html import unescape

import pytest
from conftest import CHAPTERS, ROOT


@pytest.fixture(scope="module")
def pages(book):
    return {str(p.relative_to(book)): p.read_text() for p in (book/"nbs").rglob("*.html")}


def text_of(page):
    "What a reader sees, roughly: the main part without tags"
    main = re.search(r"<main.*?</main>", page, re.S)[0]
    return unescape(re.sub(r"<[^>]+>", "", main))


def test_every_chapter_is_there(pages):
    assert set(pages) == {f"{name}.html" for name in CHAPTERS}
    sources = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT/"nbs").rglob("*")
               if p.suffix in (".ipynb", ".md") and ".ipynb_checkpoints" not in p.parts}
    assert sources == set(CHAPTERS)


def test_the_first_page_answers(pages):
    shown = re.sub(r"\s+", " ", text_of(pages["nbs/index.html"]))
    for words in ("criterion = TamedCrossEntropyLoss(alpha=1.5)", "40% noisy labels, accuracy: ", "Clean labels, accuracy: ",
                  "our scale: ", "With TCE α = 1.5 instead of CE the network gained +7.0 points (95% interval +4.5 to "
                  "+9.5, 3 seeds)"):
        assert words in shown, words
    assert "def gain_of" not in shown


def test_code_is_folded_outside_the_library(pages):
    for name in ("use/00_losses", "experiments/run", "start/use_it"):
        assert "tag_hide-input" not in pages[f"nbs/{name}.html"], name
    assert "tag_hide-input" in pages["nbs/paper/derivation.html"]


def test_no_page_shows_an_error_or_a_directive(pages):
    for name, page in pages.items():
        shown = text_of(page)
        assert "Traceback (most recent call last)" not in shown and 'class="output traceback' not in page, name
        assert not re.search(r"(?m)^\s*#\s*\|\s*(exporti?|hide|default_exp|eval)\b", shown), name


def test_section_2_has_nine_equations_and_a_figure(pages):
    page = pages["nbs/paper/derivation.html"]
    assert re.findall(r'class="eqno">\((\d)\)', page) == [str(n) for n in range(1, 10)]
    pictures = re.findall(r'<img[^>]*alt="([^"]*)"[^>]*src="([^"]*)"', page)
    figure = [(alt, src) for alt, src in pictures if "log-likelihood" in alt]
    assert len(figure) == 1 and figure[0][1].endswith(".svg")


@pytest.mark.parametrize("page, kind", [("tables", "Table"), ("derivation", "Fig."), ("learning", "Fig."), ("speed", "Fig.")])
def test_figures_and_tables_of_the_paper_are_numbered(pages, page, kind):
    assert f'<span class="caption-number">{kind} ' in pages[f"nbs/paper/{page}.html"]


def test_every_picture_exists_and_is_described(book, pages):
    for name, page in pages.items():
        main = re.search(r"<main.*?</main>", page, re.S)[0]
        for tag in re.findall(r"<img[^>]*>", main):
            source = re.search(r'src="([^"]*)"', tag)[1]
            assert (book/name).parent.joinpath(source).resolve().exists(), (name, source)
            alt = re.search(r'alt="([^"]*)"', tag)
            assert alt and len(alt[1]) > 20 and not alt[1].startswith("../"), (name, tag)


def test_nothing_is_fetched_from_elsewhere(pages):
    for name, page in pages.items():
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?://[^"]*)"', page)
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preload)"[^>]*href="(https?://[^"]*)"', page)
        assert fetched == [], name
