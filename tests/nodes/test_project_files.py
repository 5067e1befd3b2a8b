import os
import socket
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import project_files
from awsddp.nodes.project_files import EXTERNAL_LINK, UNRESOLVABLE_LINK, list_files_to_send
from tests.support.project_folder import ODD_NAMES, names, write_files


def test_project_is_sent_without_caches_environments_and_results(tmp_path: Path) -> None:
    write_files(
        tmp_path, "a.py", "pkg/b.py", "pkg/__pycache__/b.pyc", ".git/HEAD", ".venv/bin/python", "runs/j/x.log"
    )
    write_files(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", ".awsddp/key", "pkg/runs/kept.txt", ".hidden")
    assert names(tmp_path) == [".hidden", "a.py", "pkg/b.py", "pkg/runs/kept.txt"]


def test_results_folder_and_home_of_awsddp_are_excluded_at_any_path(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "out/results/x", "state/key")
    assert names(tmp_path, results="out/results", exclude=[tmp_path / "state"]) == ["a", "out"]


def test_empty_folders_are_sent(tmp_path: Path) -> None:
    write_files(tmp_path, "saved_models/old.pth", "a")
    (tmp_path / "deep/er").mkdir(parents=True)
    entries = list_files_to_send(tmp_path, ["*.pth"]).entries
    assert [(entry.kind, entry.path) for entry in entries] == [
        ("f", "a"),
        ("d", "deep/er"),
        ("d", "saved_models"),
    ]


def test_file_with_any_name_is_listed(tmp_path: Path) -> None:
    write_files(tmp_path, *ODD_NAMES, *(f"dir {name}/{name}" for name in ODD_NAMES))
    assert set(names(tmp_path)) == {*ODD_NAMES, *(f"dir {name}/{name}" for name in ODD_NAMES)}


def test_internal_links_are_sent_and_external_links_are_reported(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "sub/b")
    (tmp_path / "sub/up").symlink_to("../a")
    (tmp_path / "folder").symlink_to("sub")
    (tmp_path / "dangling").symlink_to("not/there")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "out").symlink_to("../outside")
    (tmp_path / "far").symlink_to("/etc")
    (tmp_path / "absolute").symlink_to(tmp_path / "a")
    files = list_files_to_send(tmp_path)
    kinds = {entry.path: entry.kind for entry in files.entries}
    assert kinds == {"a": "f", "sub/b": "f", "sub/up": "l", "folder": "l", "dangling": "l", "loop": "l"}
    assert dict(files.skipped) == {"out": EXTERNAL_LINK, "far": EXTERNAL_LINK, "absolute": UNRESOLVABLE_LINK}


@pytest.mark.parametrize("text", ["../p/real", "sub/../../p/real", "../p/sub/../real", "beside/real"])
def test_link_through_the_name_of_the_folder_is_not_sent(tmp_path: Path, text: str) -> None:
    """On a node the folder has another name."""
    write_files(tmp_path, "p/real/f", "p/sub/g")
    (tmp_path / "p/beside").symlink_to("../p")
    (tmp_path / "p/data").symlink_to(text)
    files = list_files_to_send(tmp_path / "p")
    assert dict(files.skipped) == {"data": UNRESOLVABLE_LINK, "beside": UNRESOLVABLE_LINK}


def test_link_with_parent_steps_inside_the_folder_is_sent(tmp_path: Path) -> None:
    write_files(tmp_path, "real/f", "sub/deep/g")
    (tmp_path / "sub/data").symlink_to("deep/../../real")
    (tmp_path / "to").symlink_to("sub/data/f")
    files = list_files_to_send(tmp_path)
    assert (files.skipped, [entry.path for entry in files.entries if entry.kind == "l"]) == (
        [],
        ["sub/data", "to"],
    )


def test_pipes_and_sockets_are_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        files = list_files_to_send(tmp_path)
    assert [path for path, _ in files.skipped] == ["pipe", "socket"]
    assert files.entries == []


def test_listing_has_its_size_and_largest_parts(tmp_path: Path) -> None:
    for path, size in {"data/a": 3000, "data/b": 4000, "big.bin": 5000, "small": 1}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * size)
    files = list_files_to_send(tmp_path)
    assert files.size == 12001
    assert files.largest(2) == (("data/", 7000), ("big.bin", 5000))


@pytest.mark.parametrize("folder", ["/", "~", "~/.."])
def test_home_or_root_folder_is_refused(isolated: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match="folder to sync"):
        list_files_to_send(Path(folder).expanduser())


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        list_files_to_send(tmp_path / "nope")


def test_too_many_files_are_refused_with_the_largest_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, *(f"data/{number}" for number in range(20)))
    monkeypatch.setattr(project_files, "_MOST_FILES", 10)
    with pytest.raises(ConfigError, match="far too large") as error:
        list_files_to_send(tmp_path)
    assert "data/" in error.value.why
    assert ".awsddpignore" in error.value.next


def test_ignored_files_are_listed_with_their_source(tmp_path: Path) -> None:
    write_files(tmp_path, "a.pt", "data/x", "sub/log/y", "sub/z", "runs/j/x", "env/pyvenv.cfg", "own/k")
    (tmp_path / ".gitignore").write_text("/data\n*.pt\n")
    (tmp_path / "sub/.gitignore").write_text("log/\n")
    files = list_files_to_send(tmp_path, ["own"])
    assert dict(files.ignored) == {
        "a.pt": ".gitignore",
        "data/": ".gitignore",
        "sub/log/": "sub/.gitignore",
        "own/": "sync.ignore",
        "env/": "awsddp",
        "runs/": "awsddp",
    }
    assert files.find_ignored("data/x") == files.find_ignored("data") == ("data/", ".gitignore")
    assert files.find_ignored("datab") is files.find_ignored("sub/z") is None
