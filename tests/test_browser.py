"""A real browser reads the built book: every page, on a screen and on a phone."""
import os
import re
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import torch
from conftest import CHAPTERS
from playwright.sync_api import expect, sync_playwright
from tce_nb.losses import tame, tamed_weight

PHONE, SCREEN = dict(width=390, height=844), dict(width=1280, height=800)
TAMING = "nbs/start/idea"
PAGES = [*CHAPTERS, "search", "genindex"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync "
         "--disable-component-update").split()
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # a page must not need one
NO_BROWSER = ("no Chromium or Chrome found: the book was not read in a browser. Get one "
              "(Debian: apt install chromium; elsewhere: .venv/bin/playwright install chromium) "
              "or name one: make test CHROME=/path/to/chrome")

# What is asked of a page, in the browser's own language. Each returns a list
# that should be empty, in words that help to mend the page.
BROKEN_PICTURES = """() => [...document.images].filter(image => image.naturalWidth === 0).map(image => image.src)"""

UNTYPESET = r"""() => {
  const left = [...document.querySelectorAll(".math")].filter(node => !node.querySelector("mjx-container"));
  const wrong = [...document.querySelectorAll("mjx-merror, [data-mjx-error]")];
  const texts = document.createTreeWalker(document.querySelector("main") || document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    if (/\\\(|\\\[|\$\$|\\(frac|alpha|log)\b/.test(node.data)
        && !node.parentElement.closest("pre, code, script, style, mjx-container")) left.push(node);
  }
  return [...left, ...wrong].map(node => node.textContent.trim().slice(0, 80));
}"""

TOO_WIDE = r"""() => {
  const width = document.documentElement.clientWidth;
  const inBox = node => {  // it scrolls in a box of its own
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement)
      if (/auto|scroll/.test(getComputedStyle(box).overflowX) && box.getBoundingClientRect().right <= width + 1)
        return true;
    return false;
  };
  const wide = [...(document.querySelector("main") || document.body).querySelectorAll("*")].filter(node =>
    node.getBoundingClientRect().right > width + 1 && node.checkVisibility({visibilityProperty: true})
    && !node.closest("mjx-assistive-mml") && !inBox(node));
  const said = wide.map(node => `${node.tagName.toLowerCase()}.${node.getAttribute("class")} reaches `
    + `${Math.round(node.getBoundingClientRect().right)} px: ${node.textContent.replace(/\s+/g, " ").slice(0, 60)}`);
  const all = document.documentElement.scrollWidth;
  return all > width ? [`the page is ${all} px wide`, ...said] : said;
}"""

HARD_TO_READ = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parsed = {};
  const rgba = colour => {  // of any CSS colour, as the browser paints it
    if (!parsed[colour]) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      parsed[colour] = [r, g, b, a / 255];
    }
    return parsed[colour];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
  const behind = node => {
    if (!node) return [255, 255, 255];
    const colour = rgba(getComputedStyle(node).backgroundColor);
    return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(node.parentElement));
  };
  const light = colour => {
    const [r, g, b] = colour.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = {};
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), node = texts.currentNode.parentElement;
    if (!text || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})
        || node.closest("script, style, noscript, mjx-assistive-mml, option, title")) continue;
    const style = getComputedStyle(node), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const below = behind(node);
    const ink = over(rgba(node.closest("svg") ? style.fill : style.color), below);
    const ratio = contrast(ink, below);
    if (ratio < (large ? 3 : 4.5)) found[[ink, below, large]] =
      `${ratio.toFixed(2)} for ${node.tagName.toLowerCase()}.${node.getAttribute("class")} `
      + `in .${node.parentElement.getAttribute("class")}, rgb(${ink.map(Math.round)}) on `
      + `rgb(${below.map(Math.round)}): ${text.slice(0, 60)}`;
  }
  for (const image of document.querySelectorAll("main img"))  // their letters are grey, for light and dark pages
    if (contrast([120, 120, 120], behind(image)) < 3) found[image.src] = `grey letters on ${behind(image)}: ${image.src}`;
  return Object.values(found);
}"""


def find_browser(playwright):
    "The browser named by CHROME, or one that is installed, or None"
    if named := os.environ.get("CHROME"): return named
    own = playwright.chromium.executable_path
    return next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        path = find_browser(playwright)
        if path is None: (pytest.fail if os.environ.get("TCE_REQUIRE_BROWSER") else pytest.skip)(NO_BROWSER)
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, NO_NETWORK])
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_): pass


@pytest.fixture(scope="session")
def site(browser, book):
    "The address of the book, served on this machine"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(book)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def new_tab(browser, **options):
    "A tab with a list `trouble` of what goes wrong in it"
    tab = browser.new_page(reduced_motion="reduce", **options)
    tab.trouble = []
    tab.on("console", lambda message: message.type in ("error", "warning") and tab.trouble.append(
        f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: tab.trouble.append(f"error: {error}"))
    tab.on("request", lambda request: re.match(r"(http://127\.0\.0\.1|file:|data:|blob:)", request.url)
           or tab.trouble.append(f"asks the network for {request.url}"))
    tab.on("requestfailed", lambda request: tab.trouble.append(f"{request.failure}: {request.url}"))
    tab.on("response", lambda answer: answer.status >= 400 and tab.trouble.append(f"{answer.status}: {answer.url}"))
    return tab


@pytest.fixture(scope="session")
def tab(browser):
    "One tab for all pages"
    return new_tab(browser)


def open_page(tab, address, size=SCREEN):
    "Load a page and wait until its formulas and letters are there"
    tab.set_viewport_size(size)
    tab.goto("about:blank")
    tab.trouble.clear()
    tab.goto(address)
    tab.evaluate("() => window.MathJax?.startup?.promise?.then(() => true)")
    tab.evaluate("() => document.fonts.ready.then(() => true)")


SMALL_TEXT = """() => [...new Set([...document.querySelectorAll("main *")].filter(node =>
  [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())
  && !node.closest("svg, mjx-container, sup, sub, .sd-hide-link-text") && node.checkVisibility()
  && parseFloat(getComputedStyle(node).fontSize) < 9).map(node => node.textContent.trim().slice(0, 60)))]"""

TABLES = """() => [...document.querySelectorAll("main table")].filter(table => {
  const cell = table.querySelector("tbody tr > *");
  return cell && !table.closest(".tce-taming") && getComputedStyle(cell).position !== "sticky";
}).map(table => table.textContent.trim().slice(0, 60))"""


def set_theme(tab, theme):
    "As the theme's own button does"
    tab.evaluate("theme => Object.assign(document.documentElement.dataset, {theme, mode: theme})", theme)


@pytest.fixture(scope="session")
def visit(tab, site):
    "All that is asked of a page, from one visit"
    visits = {}

    def visit(name):
        if name in visits: return visits[name]
        open_page(tab, f"{site}/{name}.html", PHONE)
        seen = {"pictures": tab.evaluate(BROKEN_PICTURES), "formulas": tab.evaluate(UNTYPESET),
                "links": tab.evaluate("() => [...document.links].map(link => link.href)"),
                "width": tab.evaluate(TOO_WIDE), "small": tab.evaluate(SMALL_TEXT), "tables": tab.evaluate(TABLES)}
        tab.set_viewport_size(SCREEN)
        for theme in ("light", "dark"):
            set_theme(tab, theme)
            seen[theme] = tab.evaluate(HARD_TO_READ)
        seen["trouble"] = list(tab.trouble)
        visits[name] = seen
        return seen
    return visit


def nothing(found):
    "Fail with all that was found, a line each"
    if found: pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("asked", [
    "trouble",        # errors in the console, requests that fail or leave this machine
    "pictures",       # that do not show
    "formulas",       # that are not typeset
    "width",          # what is wider than a phone and does not scroll in a box of its own
    "small",          # letters under 9 px
    "tables",         # whose first column scrolls out of sight on a phone
    "light", "dark",  # contrast under 4.5, or 3 for large letters (WCAG 2, level AA)
])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read(visit, page, asked):
    nothing(visit(page)[asked])


def test_table_2_fits_a_screen(tab, site):
    open_page(tab, f"{site}/nbs/paper/tables.html")
    nothing(tab.evaluate("""() => [...document.querySelectorAll("main table.results")].filter(table =>
      table.scrollWidth > table.clientWidth + 1).map(table => `${table.scrollWidth} px: ${table.textContent}`)"""))


def test_the_library_is_folded_in_the_sidebar(tab, site):
    open_page(tab, f"{site}/nbs/index.html")
    link = tab.locator('.bd-sidebar-primary a[href$="use/00_losses.html"]')
    expect(link).to_have_text("tce_nb.losses")
    expect(link).to_be_hidden()


@pytest.fixture(scope="session")
def anchors(book):
    "The ids of every built page, by its path"
    return {p.relative_to(book).as_posix(): set(re.findall(r'\bid="([^"]+)"', p.read_text()))
            for p in book.rglob("*.html")}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(visit, site, book, anchors, page):
    dead = set()
    for link in visit(page)["links"]:
        if not link.startswith(site): continue
        address, anchor = urldefrag(link)
        path = unquote(urlsplit(address).path).lstrip("/") or "index.html"
        if not (book/path).is_file(): dead.add(f"no file {path}")
        elif anchor and unquote(anchor) not in anchors.get(path, ()): dead.add(f"no id {anchor} in {path}")
    nothing(sorted(dead))


def test_the_address_of_the_book_opens_the_first_page(tab, site):
    tab.goto(site)
    tab.wait_for_url("**/nbs/index.html")


def test_a_dark_system_gets_dark_pages(tab, site):
    for scheme in ("dark", "light"):
        tab.emulate_media(color_scheme=scheme)
        open_page(tab, f"{site}/nbs/index.html")
        expect(tab.locator("html")).to_have_attribute("data-theme", scheme)


# How a page is read: from a server, or opened from the disk as `make book` says.
@pytest.fixture(params=["served", "opened from disk"])
def address(request, site, book):
    return site if request.param == "served" else book.as_uri()


@pytest.mark.parametrize("words, page", [("tamed", "start/idea"), ("cite", "about"), ("license", "about")])
def test_the_search_finds(tab, address, words, page):
    open_page(tab, f"{address}/search.html?q={words}")
    expect(tab.locator(f'#search-results li a[href*="nbs/{page}.html"]').first).to_be_visible()
    if address.startswith("http"): nothing(tab.trouble)  # from disk, the excerpts of results stay out


class Figure:
    "The figure that the reader moves, as a reader handles it"
    def __init__(self, tab): self.tab, self.box = tab, tab.locator(".tce-taming")

    def set(self, **sliders):
        for name, value in sliders.items():
            self.box.locator(f"[name={name}]").evaluate(
                "(slider, value) => { slider.step = 'any'; slider.value = value;"
                " slider.dispatchEvent(new Event('input', {bubbles: true})); }", str(value))

    def shows(self, name): return float(self.box.locator(f"data[data-show={name}]").get_attribute("value"))
    def text(self, name): return self.box.locator(f"[data-show={name}]").first.inner_text()
    def said(self): return re.sub(r"\s+", " ", self.box.locator("[aria-live]").inner_text())
    def path(self, panel, kind="tamed"): return self.box.locator(
        f"[data-panel={panel}] path.{kind}").get_attribute("d")


@pytest.fixture
def figure(tab, address):
    open_page(tab, f"{address}/{TAMING}.html")
    yield Figure(tab)
    nothing(tab.trouble)


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 0.95, 1 - 1e-9, 1.0, 1 + 1e-9, 1.5, 3.0])
def test_the_figure_agrees_with_the_library(tab, site, alpha):
    if not tab.url.startswith(f"{site}/{TAMING}"): open_page(tab, f"{site}/{TAMING}.html")
    figure = Figure(tab)
    for index, num_classes in enumerate((2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)):
        figure.set(alpha=alpha, classes=index)
        assert figure.text("classes") == str(num_classes)
        ce = torch.tensor(num_classes, dtype=torch.float64).log()
        for name, value in {"ce-loss": ce, "ce-weight": torch.tensor(1.0), "tamed-loss": tame(ce, alpha),
                            "tamed-weight": tamed_weight(ce, alpha)}.items():
            assert figure.shows(name) == pytest.approx(value.item(), rel=1e-12), name
            assert figure.text(name) == f"{figure.shows(name):.3f}"


def test_the_sliders_move_the_figure(figure):
    alpha, classes = (figure.box.locator(f"[name={name}]") for name in ("alpha", "classes"))
    assert "(1 + ln 10)−1.50 = 0.167" in figure.said()
    before = figure.path("loss"), figure.path("weight")
    alpha.focus()
    figure.tab.keyboard.press("ArrowRight")
    assert figure.text("alpha") == "1.55"
    assert figure.path("loss") != before[0] and figure.path("weight") != before[1]
    dot = figure.box.locator("[data-panel=weight] circle.tamed")
    left = float(dot.get_attribute("cx"))
    classes.focus()
    for _ in range(3): figure.tab.keyboard.press("ArrowRight")
    assert figure.text("classes") == "100" and float(dot.get_attribute("cx")) > left
    assert classes.get_attribute("aria-valuetext") == "100 classes"
    assert "(1 + ln 100)−1.55 = 0.069" in figure.said()


def test_a_finger_moves_the_slider_on_a_phone(browser, site):
    tab = new_tab(browser, has_touch=True, is_mobile=True)
    open_page(tab, f"{site}/{TAMING}.html", PHONE)
    slider = tab.locator(".tce-taming [name=alpha]")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box["width"] > 300 and box["height"] >= 44
    tab.touchscreen.tap(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    expect(tab.locator(".tce-taming [data-show=alpha]").first).to_have_text("3.00")
    nothing(tab.trouble)
    tab.close()


def test_without_javascript_the_figure_says_what_is_missing(browser, site):
    tab = new_tab(browser, java_script_enabled=False)
    tab.goto(f"{site}/{TAMING}.html")
    expect(tab.locator(".tce-taming")).to_contain_text("with JavaScript on")
    tab.close()
