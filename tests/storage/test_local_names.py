"""Which results are fetched, and their names at home."""

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from awsddp.model.node_answers import Manifest, ResultFile
from awsddp.storage.local_names import assign_local_names, find_excess_files


def file(home: str, *, path: str | None = None, size: int = 1, limited: bool = True) -> ResultFile:
    return ResultFile(path=path or f"/w/{home}", home=home, size=size, limited=limited)


def named(*homes: str, links: tuple[tuple[str, str], ...] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """Return the name at home of each place that a node names, and the target of each link."""
    entries = [file(home) for home in homes]
    entries += [replace(file(home), target=target) for home, target in links]
    made = assign_local_names({0: Manifest(files=tuple(entries), skipped=())})
    files = {one.path.removeprefix("/w/"): one.home for one in made if one.target is None}
    return files, {one.home: one.target for one in made if one.target is not None}


def test_names_that_some_file_system_takes_for_one_are_told_apart() -> None:
    names, _ = named("n/A", "n/a", "n/caf\u00e9", "n/cafe\u0301", "n/stra\u00dfe", "n/STRASSE", "n/b")
    assert names == {
        "n/A": "n/A",
        "n/a": "n/a~2",
        "n/cafe\u0301": "n/cafe\u0301",
        "n/caf\u00e9": "n/caf\u00e9~2",
        "n/STRASSE": "n/STRASSE",
        "n/stra\u00dfe": "n/stra\u00dfe~2",
        "n/b": "n/b",
    }


def test_folders_that_differ_in_case_stay_two_folders() -> None:
    names, _ = named("n/Out/x", "n/out/x", "n/out/y", "n/OUT")
    assert names == {"n/OUT": "n/OUT", "n/Out/x": "n/Out~2/x", "n/out/x": "n/out~3/x", "n/out/y": "n/out~3/y"}


def test_name_with_the_suffix_is_no_way_to_collide() -> None:
    names, _ = named("n/A", "n/a", "n/a~2")
    assert sorted(names.values()) == ["n/A", "n/a~2", "n/a~2~2"]


@pytest.mark.timeout(20)
def test_a_hostile_node_that_lists_names_that_all_collide_holds_nobody_up() -> None:
    spellings = ["".join(letters) for letters in itertools.product("aA", repeat=14)]
    names, _ = named(*(f"n/{one}" for one in spellings))
    assert len({name.casefold() for name in names.values()}) == len(spellings)


def test_names_of_all_nodes_are_decided_together() -> None:
    manifests = {node: Manifest(files=(file("logs/x"),), skipped=()) for node in (1, 0)}
    files = assign_local_names(manifests)
    assert [(one.node, one.home) for one in files] == [(0, "logs/x"), (1, "logs/x~2")]


def test_two_files_of_one_node_for_one_place_get_two() -> None:
    manifest = Manifest(files=(file("n/x", path="/b"), file("n/x", path="/a")), skipped=())
    files = assign_local_names({0: manifest})
    assert [(one.path, one.home) for one in files] == [("/a", "n/x"), ("/b", "n/x~2")]


def test_long_name_stays_a_name() -> None:
    names, _ = named("n/" + "A" * 255, "n/" + "a" * 255)
    assert {len(name.encode()) for name in names.values()} == {257}


def test_settings_of_git_are_no_settings_of_git_at_home() -> None:
    names, _ = named("n/.git/config", "n/repo/.GIT")
    assert names == {"n/.git/config": "n/.git~/config", "n/repo/.GIT": "n/repo/.GIT~"}


def test_names_have_no_control_characters_at_home() -> None:
    nasty, long = "node0/a\x1b[2J/b\u202egnp.\t\n\x9b\udcff", f"node0/{'x' * 253}\x1b"
    links = (("node0/l\x07", nasty), ("node0/m", "node0/none\x1b"))
    files, targets = named(nasty, long, links=links)
    shown = r"a\x1b[2J/b\u202egnp.\x09\n\x9b" + "\udcff"
    assert files == {nasty: f"node0/{shown}", long: f"node0/{'x' * 253}\\x"}
    assert targets == {r"node0/l\x07": f"node0/{shown}", "node0/m": r"node0/none\x1b"}


def test_link_points_to_what_its_target_is_called_at_home() -> None:
    _, links = named(
        "n/A",
        "n/a",
        "n/B/x",
        "n/b/x",
        links=(("n/deep/one", "n/a"), ("n/two", "n/b"), ("n/b/three", "n/b/x"), ("n/gone", "n/no/where")),
    )
    assert links == {
        "n/deep/one": "n/a~2",
        "n/two": "n/b~2",
        "n/b~2/three": "n/b~2/x",
        "n/gone": "n/no/where",
    }


def test_over_the_limit_the_largest_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n/home").write_bytes(bytes(70))
    (tmp_path / "n/50").write_text("another file")
    manifest = Manifest(
        files=(
            file("n/10", size=10),
            file("n/60", size=60),
            file("n/50", size=50),
            file("n/output", size=1000, limited=False),
            file("n/home", size=70),
        ),
        skipped=(),
    )
    files = assign_local_names({0: manifest, 1: Manifest(files=(file("m/40", size=40),), skipped=())})

    def excess(limit: float) -> list[str]:
        return [one.home for one in find_excess_files(files, limit, results=tmp_path)]

    assert (excess(160), excess(159), excess(49), excess(0)) == (
        [],
        ["n/60"],
        ["m/40", "n/50", "n/60"],
        ["n/10", "m/40", "n/50", "n/60"],
    )
