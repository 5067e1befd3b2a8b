import os
import socket
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import project_files
from awsddp.nodes.project_files import EXTERNAL_LINK, UNRESOLVABLE_LINK, list_files_to_send
from tests.support.project_folder import HELL, make, names


def test_everything_is_sent_but_what_never_is(tmp_path: Path) -> None:
    make(
        tmp_path, "a.py", "pkg/b.py", "pkg/__pycache__/b.pyc", ".git/HEAD", ".venv/bin/python", "runs/j/x.log"
    )
    make(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", ".awsddp/key", "pkg/runs/kept.txt", ".hidden")
    assert names(tmp_path) == [".hidden", "a.py", "pkg/b.py", "pkg/runs/kept.txt"]


def test_the_folder_of_results_and_awsddps_home_are_left_out_wherever_they_are(tmp_path: Path) -> None:
    make(tmp_path, "a", "out/results/x", "state/key")
    assert names(tmp_path, results="out/results", exclude=[tmp_path / "state"]) == ["a", "out"]


def test_folders_that_would_be_empty_are_sent_as_such(tmp_path: Path) -> None:
    make(tmp_path, "saved_models/old.pth", "a")
    (tmp_path / "deep/er").mkdir(parents=True)
    found = list_files_to_send(tmp_path, ["*.pth"]).entries
    assert [(entry.kind, entry.path) for entry in found] == [
        ("f", "a"),
        ("d", "deep/er"),
        ("d", "saved_models"),
    ]


def test_any_name_is_a_name(tmp_path: Path) -> None:
    make(tmp_path, *HELL, *(f"dir {name}/{name}" for name in HELL))
    assert set(names(tmp_path)) == {*HELL, *(f"dir {name}/{name}" for name in HELL)}


def test_links_within_go_and_links_that_lead_out_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a", "sub/b")
    (tmp_path / "sub/up").symlink_to("../a")
    (tmp_path / "folder").symlink_to("sub")
    (tmp_path / "dangling").symlink_to("not/there")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "out").symlink_to("../outside")
    (tmp_path / "far").symlink_to("/etc")
    (tmp_path / "absolute").symlink_to(tmp_path / "a")
    found = list_files_to_send(tmp_path)
    kinds = {entry.path: entry.kind for entry in found.entries}
    assert kinds == {"a": "f", "sub/b": "f", "sub/up": "l", "folder": "l", "dangling": "l", "loop": "l"}
    assert dict(found.skipped) == {"out": EXTERNAL_LINK, "far": EXTERNAL_LINK, "absolute": UNRESOLVABLE_LINK}


@pytest.mark.parametrize("text", ["../p/real", "sub/../../p/real", "../p/sub/../real", "beside/real"])
def test_a_link_into_the_folder_by_way_of_its_own_name_is_not_sent(tmp_path: Path, text: str) -> None:
    """On a node the folder has another name."""
    make(tmp_path, "p/real/f", "p/sub/g")
    (tmp_path / "p/beside").symlink_to("../p")
    (tmp_path / "p/data").symlink_to(text)
    found = list_files_to_send(tmp_path / "p")
    assert dict(found.skipped) == {"data": UNRESOLVABLE_LINK, "beside": UNRESOLVABLE_LINK}


def test_a_link_that_turns_within_the_folder_is_sent(tmp_path: Path) -> None:
    make(tmp_path, "real/f", "sub/deep/g")
    (tmp_path / "sub/data").symlink_to("deep/../../real")
    (tmp_path / "to").symlink_to("sub/data/f")
    found = list_files_to_send(tmp_path)
    assert (found.skipped, [one.path for one in found.entries if one.kind == "l"]) == ([], ["sub/data", "to"])


def test_what_is_neither_file_nor_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(tmp_path / "socket"))
        found = list_files_to_send(tmp_path)
    assert [path for path, _ in found.skipped] == ["pipe", "socket"]
    assert found.entries == []


def test_the_size_and_what_makes_it(tmp_path: Path) -> None:
    for path, size in {"data/a": 3000, "data/b": 4000, "big.bin": 5000, "small": 1}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * size)
    found = list_files_to_send(tmp_path)
    assert found.size == 12001
    assert found.largest(2) == (("data/", 7000), ("big.bin", 5000))


@pytest.mark.parametrize("place", ["/", "~", "~/.."])
def test_a_home_or_a_system_is_never_sent(isolated: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="folder to sync"):
        list_files_to_send(Path(place).expanduser())


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        list_files_to_send(tmp_path / "nope")


def test_far_too_much_is_refused_with_the_names_of_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, *(f"data/{number}" for number in range(20)))
    monkeypatch.setattr(project_files, "_MOST_FILES", 10)
    with pytest.raises(ConfigError, match="far too large") as caught:
        list_files_to_send(tmp_path)
    assert "data/" in caught.value.why
    assert ".awsddpignore" in caught.value.next


def test_what_stays_here_is_named_with_what_keeps_it(tmp_path: Path) -> None:
    make(tmp_path, "a.pt", "data/x", "sub/log/y", "sub/z", "runs/j/x", "env/pyvenv.cfg", "own/k")
    (tmp_path / ".gitignore").write_text("/data\n*.pt\n")
    (tmp_path / "sub/.gitignore").write_text("log/\n")
    found = list_files_to_send(tmp_path, ["own"])
    assert dict(found.ignored) == {
        "a.pt": ".gitignore",
        "data/": ".gitignore",
        "sub/log/": "sub/.gitignore",
        "own/": "sync.ignore",
        "env/": "awsddp",
        "runs/": "awsddp",
    }
    assert found.find_ignored("data/x") == found.find_ignored("data") == ("data/", ".gitignore")
    assert found.find_ignored("datab") is found.find_ignored("sub/z") is None
