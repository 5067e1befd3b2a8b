"""Which results are fetched, and their local names."""

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from awsddp.model.node_answers import Manifest, ResultFile
from awsddp.storage.local_names import assign_local_names, find_excess_files


def make_file(home: str, *, path: str | None = None, size: int = 1, limited: bool = True) -> ResultFile:
    return ResultFile(path=path or f"/w/{home}", home=home, size=size, limited=limited)


def assign(*homes: str, links: tuple[tuple[str, str], ...] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """Return the local name of each results path of a node, and the target of each link."""
    entries = [make_file(home) for home in homes]
    entries += [replace(make_file(home), target=target) for home, target in links]
    results = assign_local_names({0: Manifest(files=tuple(entries), skipped=())})
    files = {result.path.removeprefix("/w/"): result.home for result in results if result.target is None}
    return files, {result.home: result.target for result in results if result.target is not None}


def test_names_that_some_file_systems_do_not_distinguish_get_suffixes() -> None:
    names, _ = assign("n/A", "n/a", "n/caf\u00e9", "n/cafe\u0301", "n/stra\u00dfe", "n/STRASSE", "n/b")
    assert names == {
        "n/A": "n/A",
        "n/a": "n/a~2",
        "n/cafe\u0301": "n/cafe\u0301",
        "n/caf\u00e9": "n/caf\u00e9~2",
        "n/STRASSE": "n/STRASSE",
        "n/stra\u00dfe": "n/stra\u00dfe~2",
        "n/b": "n/b",
    }


def test_folders_that_differ_only_in_case_stay_separate() -> None:
    names, _ = assign("n/Out/x", "n/out/x", "n/out/y", "n/OUT")
    assert names == {"n/OUT": "n/OUT", "n/Out/x": "n/Out~2/x", "n/out/x": "n/out~3/x", "n/out/y": "n/out~3/y"}


def test_a_name_that_has_a_suffix_does_not_collide() -> None:
    names, _ = assign("n/A", "n/a", "n/a~2")
    assert sorted(names.values()) == ["n/A", "n/a~2", "n/a~2~2"]


@pytest.mark.timeout(20)
def test_many_colliding_names_of_a_hostile_node_take_little_time() -> None:
    spellings = ["".join(letters) for letters in itertools.product("aA", repeat=14)]
    names, _ = assign(*(f"n/{spelling}" for spelling in spellings))
    assert len({name.casefold() for name in names.values()}) == len(spellings)


def test_names_are_unique_among_all_nodes() -> None:
    manifests = {node: Manifest(files=(make_file("logs/x"),), skipped=()) for node in (1, 0)}
    files = assign_local_names(manifests)
    assert [(file.node, file.home) for file in files] == [(0, "logs/x"), (1, "logs/x~2")]


def test_two_files_with_the_same_path_get_two_names() -> None:
    manifest = Manifest(files=(make_file("n/x", path="/b"), make_file("n/x", path="/a")), skipped=())
    files = assign_local_names({0: manifest})
    assert [(file.path, file.home) for file in files] == [("/a", "n/x"), ("/b", "n/x~2")]


def test_a_suffix_does_not_make_a_long_name_longer() -> None:
    names, _ = assign("n/" + "A" * 255, "n/" + "a" * 255)
    assert {len(name.encode()) for name in names.values()} == {257}


def test_git_folders_in_results_are_renamed() -> None:
    names, _ = assign("n/.git/config", "n/repo/.GIT")
    assert names == {"n/.git/config": "n/.git~/config", "n/repo/.GIT": "n/repo/.GIT~"}


def test_local_names_have_no_control_characters() -> None:
    nasty, long = "node0/a\x1b[2J/b\u202egnp.\t\n\x9b\udcff", f"node0/{'x' * 253}\x1b"
    links = (("node0/l\x07", nasty), ("node0/m", "node0/none\x1b"))
    files, targets = assign(nasty, long, links=links)
    shown = r"a\x1b[2J/b\u202egnp.\x09\n\x9b" + "\udcff"
    assert files == {nasty: f"node0/{shown}", long: f"node0/{'x' * 253}\\x"}
    assert targets == {r"node0/l\x07": f"node0/{shown}", "node0/m": r"node0/none\x1b"}


def test_a_link_points_to_the_local_name_of_its_target() -> None:
    _, links = assign(
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


def test_the_largest_files_over_the_limit_are_excess(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n/home").write_bytes(bytes(70))
    (tmp_path / "n/50").write_text("another file")
    manifest = Manifest(
        files=(
            make_file("n/10", size=10),
            make_file("n/60", size=60),
            make_file("n/50", size=50),
            make_file("n/output", size=1000, limited=False),
            make_file("n/home", size=70),
        ),
        skipped=(),
    )
    files = assign_local_names({0: manifest, 1: Manifest(files=(make_file("m/40", size=40),), skipped=())})

    def list_excess(limit: float) -> list[str]:
        return [file.home for file in find_excess_files(files, limit, results=tmp_path)]

    assert (list_excess(160), list_excess(159), list_excess(49), list_excess(0)) == (
        [],
        ["n/60"],
        ["m/40", "n/50", "n/60"],
        ["n/10", "m/40", "n/50", "n/60"],
    )
