"""One bad experiment from outside harms nothing else: it is named and left out, or refused where it was asked for."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.experiments import registry
from mathinterp.experiments.heads import Heads
from mathinterp.plugins import GROUP
from mathinterp.store import Store
from mathinterp.store.catalog import Catalog
from mathinterp.store.schema import STORE_TABLES
from tests.small_store import fill, prompt

GOOD = """
from dataclasses import dataclass
from typing import ClassVar
import pyarrow as pa
from mathinterp.experiments import Experiment, Shard, Table, option

@dataclass(frozen=True)
class Good(Experiment):
    \"\"\"Do nothing.\"\"\"
    many: int = option(1, "How many.", least=1)
    name: ClassVar[str] = "good"
    tables: ClassVar = {"good_rows": Table(pa.schema([("layer", pa.int16())]), doc="a row.")}
    views: ClassVar = {}
    def parameters(self): return {"many": self.many}
    def shards(self, shape, prompts): return [Shard("good_rows", 0)]
    def prepare(self, subject): return None
    def run(self, state, shard): raise AssertionError
"""
ITS_OWN = GOOD.replace('"good"', '"bad"')
OTHER_TABLE = 'tables: ClassVar = {"head_scan": Table(pa.schema([("x", pa.int8())])), '
NO_VIEWS = "views: ClassVar = {}"
BAD = {  # what is changed in it, and what the warning says
    "no_import": (GOOD.replace("import pyarrow as pa", "import no_such_package"), "No module named 'no_such_package'"),
    "raises": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "no_class": ("Other = 1", "has no attribute 'Good'"),
    "no_experiment": ("class Good: pass", "derive a class from mathinterp.experiments.Experiment"),
    "no_dataclass": (GOOD.replace("@dataclass(frozen=True)", "").replace("many: int", "many: ClassVar"), "a dataclass"),
    "no_tables": (ITS_OWN.replace("tables: ClassVar", "other: ClassVar"), "must say in its attribute tables"),
    "name": (GOOD.replace('"good"', '"heads"'), "there is another experiment 'heads'"),
    "table": (ITS_OWN.replace("tables: ClassVar = {", OTHER_TABLE), "'head_scan' is a table"),
    "views": (ITS_OWN.replace(NO_VIEWS, "views: ClassVar = {'head_scan': 'CREATE VIEW head_scan'}"), "'head_scan'"),
    "of_store": (ITS_OWN.replace(NO_VIEWS, "views: ClassVar = {'runs': 'CREATE VIEW runs'}"), "'runs' is a"),
}  # fmt: skip


def forget() -> None:
    for cached in (registry._installed, registry.stored, registry.experiments):
        cached.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Puts modules on the path as packages that announce their class ``Good``."""

    def install(modules: dict[str, str]) -> None:
        for name, text in modules.items():
            (tmp_path / f"plugin_{name}.py").write_text(text)
            about = tmp_path / f"plugin_{name}-1.0.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n")
            (about / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = plugin_{name}:Good\n")
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield install
    monkeypatch.undo()
    forget()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    fill(made, [prompt("p")], [{"prompt_id": "p"}], [{"prompt_id": "p", "layer": 0, "head": 0}])
    return made


def command(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_installed_experiment_is_named_in_a_line_and_all_else_goes_on(installed, store, fault, caplog):
    text, told = BAD[fault]
    installed({fault: text, "good": GOOD})
    answer = command("sql", "--store", store.url, "--json", "SELECT count(*) AS n FROM head_scan")
    assert json.loads(answer.stdout) == [{"n": 1}]
    warnings = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"the installed experiment {fault} (plugin_{fault}:Good) is left out: ")
    assert told in warnings[0]
    assert "\n" not in warnings[0]

    assert registry.find("heads") is Heads
    assert registry.find("good").__module__ == "plugin_good", "the good one beside it is there"
    assert registry.stored().tables["head_scan"] == Heads.tables["head_scan"]


@pytest.mark.slow
def test_every_command_goes_on_beside_many_bad_ones(installed, store):
    installed({"good": GOOD, **{fault: text for fault, (text, _) in BAD.items()}})
    assert "good" in command("scan", "--help").stdout
    assert "--many" in command("scan", "good", "--help").stdout
    assert "head_effects" in command("sql", "--store", store.url).stdout
    command("check", "--store", store.url)
    command("report", "--store", store.url, "--out", str(Path(store.url).parent / "report"))


def test_an_installed_one_with_a_command_of_its_own_is_listed_and_called(installed):
    assert "own" not in command("--help").stdout.split()
    installed(
        {"own": ITS_OWN.replace('"bad"', '"own"').replace(NO_VIEWS, f"{NO_VIEWS}\n    own_command: ClassVar = True")}
    )
    listed = command("--help").stdout
    assert listed.index("Commands:") > listed.index("Serve results")
    assert listed.splitlines()[-1].split() == ["own", "Do", "nothing."]
    assert "--many" in command("own", "--help").stdout


def test_of_two_installed_ones_that_clash_the_second_is_left_out(installed, caplog):
    installed({"good": GOOD, "more": GOOD.replace('"good"', '"more"').replace("int16", "int32")})
    assert registry.find("good").__module__ == "plugin_good"
    assert "more" not in registry.experiments()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "plugin_more:Good: 'good_rows' is a table or view of another experiment" in line


@pytest.mark.parametrize("fault", ["name", "table", "views", "of_store", "no_tables", "no_dataclass"])
def test_one_that_is_asked_for_by_its_class_is_refused_in_one_line(tmp_path, monkeypatch, fault):
    text, told = BAD[fault]
    (tmp_path / f"asked_{fault}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["plan", f"asked_{fault}:Good"])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert told in line
    assert registry.find("heads") is Heads, "and the process is as it was"


def test_python_refuses_a_class_with_the_name_of_another():
    class Mine(Heads):
        """Rows that would be taken for those of the head scan."""

    with pytest.raises(mi.UserError, match="there is another experiment 'heads'; give the class a name"):
        registry.add(Mine)


def test_two_classes_of_a_module_share_its_views_and_tables(tmp_path, monkeypatch):
    twin = GOOD.replace("class Good", "class Twin").replace('"good"', '"twin"')
    view = "-- good_means: x.\nCREATE OR REPLACE VIEW good_means AS SELECT 1 AS x;\n"
    (tmp_path / "pair_of_them.py").write_text(GOOD + twin)
    (tmp_path / "views").mkdir()
    (tmp_path / "views" / "good_means.sql").write_text(view)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Good", "Twin"):
        assert registry.find(f"pair_of_them:{name}").name == name.lower()
    assert {"good_means"} <= registry.stored().views.keys()


def test_the_stores_own_names_are_all_reserved():
    own = Catalog(registry.Stored({}, {}))
    names = {*STORE_TABLES, *own.views, "functions"}
    assert names <= registry.OF_THE_STORE
