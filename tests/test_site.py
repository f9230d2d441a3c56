"""The documentation site builds without a warning and asks nothing of other servers; generated pages are complete."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
import yaml

import mathinterp
from mathinterp.cli.data_model import columns_of_views, made_otherwise, page
from mathinterp.experiments import registry
from mathinterp.experiments.options import options_of
from mathinterp.store.catalog import catalog
from mathinterp.store.columns import FILE, STORED, described, folder_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PICTURES = sorted(file for file in (DOCS / "pictures").iterdir() if file.suffix in (".svg", ".png"))
CODE = {
    file: file.read_text(encoding="utf-8")
    for file in (ROOT / "mathinterp").rglob("*")
    if file.suffix in (".py", ".sql")
}


class Assets(HTMLParser):
    """What a browser would load for a page, and the ids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag in ("script", "img", "iframe", "source", "video"):
            self.loaded.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given.get("href") or "")


def read(file: Path) -> Assets:
    parser = Assets()
    parser.feed(file.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; a warning, such as of a link that leads nowhere, is an error."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_no_page_of_the_site_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert {file.stem for file in DOCS.glob("*.md")} <= {file.stem for file in pages}
    for file in pages:
        loaded = read(file).loaded
        assert loaded
        assert [place for place in loaded if urlsplit(place).netloc] == [], file.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style.name
    assert not list(site.rglob("*.py"))


@pytest.mark.slow
def test_the_site_has_every_public_name_and_every_field_of_every_experiment(site: Path) -> None:
    ids = read(site / "python.html").ids
    modules = {name for name in mathinterp.__all__ if isinstance(getattr(mathinterp, name), ModuleType)}
    assert modules == {"experiments", "prompts", "tune"}
    tuning = (
        value for value in vars(mathinterp.tune).values() if getattr(value, "__module__", "") == "mathinterp.tune"
    )
    functions = [value for value in tuning if not value.__name__.startswith("_")]
    assert functions
    for public in [*functions, *(getattr(mathinterp, name) for name in set(mathinterp.__all__) - modules)]:
        name = public.__qualname__
        assert f"{public.__module__}.{public.__qualname__}" in ids, f"docs/python.md lacks {name}"
    for experiment in registry.experiments().values():
        if experiment.__module__.startswith("mathinterp.") and experiment.on_command_line:
            own = f"{experiment.__module__}.{experiment.__qualname__}"
            assert own in ids, f"docs/python.md lacks {own}"
            missing = [name for name in options_of(experiment) if f"{own}.{name}" not in ids]
            assert not missing, f"{own}: {missing}"


@pytest.fixture(scope="module")
def columns() -> dict[str, dict[str, str]]:
    """Every view, and "stored NAME" for tables whose view differs: column -> type."""
    views = columns_of_views()
    return {**views, **made_otherwise(views)}


@pytest.mark.slow
def test_every_view_and_column_is_explained(columns: dict[str, dict[str, str]]) -> None:
    views = catalog().views
    assert views.keys() == {name for name in columns if not name.startswith(STORED)}
    assert [view for view in views if not catalog().about[view]] == []
    meanings = described(columns)
    assert len(meanings) > 150
    missing = [f"{view}.{name}" for view, told in meanings.items() for name, text in told.items() if not text]
    assert not missing, f"say in the {FILE} of its folder what these are: {missing}"


@pytest.mark.slow
def test_the_data_model_page_is_what_the_schemas_say() -> None:
    assert (DOCS / "data-model.md").read_text(encoding="utf-8") == page(), (
        "run: python -m mathinterp.cli.data_model > docs/data-model.md"
    )


@pytest.mark.slow
def test_no_column_is_explained_that_is_not_there(columns: dict[str, dict[str, str]]) -> None:
    for file in sorted((ROOT / "mathinterp").rglob(FILE)):
        own = {view: names for view, names in columns.items() if folder_of(view) == file.parent}
        shared = file.parent.name in ("experiments", "store")
        for view, told in yaml.safe_load(file.read_text(encoding="utf-8")).items():
            if view == "any":
                there = {name for names in (columns if shared else own).values() for name in names}
            else:
                assert view in columns, f"{file}: there is no view {view}"
                there = set(columns[view])
            exact = {name for name in told if not re.search(r"[*?]", name)}
            assert exact <= there, f"{file}, {view}: {exact - there}"


@pytest.mark.slow
def test_tables_whose_view_differs_are_listed_with_their_own_columns(columns: dict[str, dict[str, str]]) -> None:
    differing = {name.removeprefix(STORED) for name in columns if name.startswith(STORED)}
    assert {"gender_neurons", "neuron_scan"} <= differing
    for name, table in catalog().tables.items():
        shown = columns[f"{STORED}{name}" if name in differing else name]
        assert set(table.schema.names) <= set(shown), name


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


@pytest.mark.parametrize("file", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda file: file.name)
def test_anchors_of_pages_outside_the_site_are_headings(file: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", file.read_text(encoding="utf-8")):
        text = (file.parent / target if target else file).read_text(encoding="utf-8")
        headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}
        assert anchor in headings, f"{file.name} links to {target}#{anchor}"


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_to_other_servers_are_whole(file: Path) -> None:
    for link in re.findall(r"\]\((https?:[^)]*)\)", file.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
        assert not re.search(r"\s|[.,;]$", link), link


def test_sections_of_the_method_that_the_code_names_are_there() -> None:
    headings = set(re.findall(r"^## (\d+)\. ", (DOCS / "method.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = re.compile(r"method\.md,? (?:sections?|sec\.)? ?(\d)(?: and (\d))?")
    found = [number for text in CODE.values() for numbers in named.findall(text) for number in numbers if number]
    assert len(found) > 20
    assert set(found) <= headings


def test_messages_that_troubleshooting_explains_are_those_of_the_program() -> None:
    said = re.sub(r'"\s*\n?\s*f?"', "", "".join(CODE.values()))
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]*) \|", text, flags=re.MULTILINE)
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if not cell.startswith("`sure`")]
    assert len(quoted) > 20
    missing = [
        quote for quote in quoted for part in quote.split("...") if part.strip(" '") and part.strip() not in said
    ]
    assert not missing, missing


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_small_shown_and_ask_nothing_of_other_servers(picture: Path) -> None:
    assert picture.stat().st_size < 150_000
    assert any(f"pictures/{picture.name})" in file.read_text(encoding="utf-8") for file in PAGES)
    if picture.suffix == ".svg":
        text = re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", picture.read_text(encoding="utf-8"))
        assert "<svg" in text
        assert not re.search(r"(href|src)=\"https?:|url\(['\"]?https?:|@import", text)


def test_every_notebook_is_on_the_page_of_notebooks() -> None:
    text = (DOCS / "notebooks.md").read_text(encoding="utf-8")
    assert [
        file.name for file in (ROOT / "notebooks").glob("*.ipynb") if f"(../notebooks/{file.name})" not in text
    ] == []


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """docs/pictures/make.py."""
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "pictures" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_has_a_recipe(made: ModuleType) -> None:
    by_a_command = {"operand_map"}  # see the script's docstring
    assert {picture.stem for picture in PICTURES} - by_a_command <= made.PICTURES.keys()


def test_a_bar_that_is_written_over_leaves_the_lines_around_it(made: ModuleType) -> None:
    screen = made.Screen()
    for text in ("first\r\n\x1b[?25l", "\r\x1b[2Kshards 1/5, 20% done", "\r\x1b[2Kshards 2/5, 40% done", "\r\x1b[2K"):
        screen.write(text)
    assert screen.lines == ["first", ""]
    screen.write("\x1b[1mlast\x1b[0m\n")
    assert [made.plain(line) for line in screen.lines] == ["first", "last", ""]


def test_a_terminal_is_drawn_with_its_text_and_no_font_of_a_server(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(made, "HERE", tmp_path)
    made.draw("drawn", "mathinterp sql", ["\x1b[1mlayer\x1b[0m  head", "    0     6"])
    text = (tmp_path / "drawn.svg").read_text()
    assert "mathinterp&#160;sql" in text
    assert "head" in text
    assert "font-face" not in text
    assert "cdnjs" not in text
