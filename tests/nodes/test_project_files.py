import os
import random
import socket
import subprocess
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.nodes import project_files
from awsddp.nodes.project_files import ASTRAY, OUT, files_to_send

HELL = [
    " ",
    "a b",
    "'",
    '"',
    "$(touch canary)",
    "-rf",
    "--delete",
    "new\nline",
    "tab\t",
    "*",
    "?",
    "[a]",
    "#x",
    ";",
    "\\",
    "end\\",
    "%s",
    "@@{key}",
    ":",
    "node0:",
    "~",
    "ünï",
    "\udcff\udcfe",
    "...",
    "..a",
    " lead",
    "trail ",
    "x" * 200,
]


def make(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path.encode("utf-8", "surrogateescape").hex())


def names(root: Path, *ignore: str, **settings: object) -> list[str]:
    return [entry.path for entry in files_to_send(root, ignore, **settings).entries]  # type: ignore[arg-type]


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
    found = files_to_send(tmp_path, ["*.pth"]).entries
    assert [(entry.kind, entry.path) for entry in found] == [
        ("f", "a"),
        ("d", "deep/er"),
        ("d", "saved_models"),
    ]


def test_awsddpignore_takes_the_place_of_gitignore(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", "sub/a", "sub/b")
    (tmp_path / ".gitignore").write_text("a\n")
    assert names(tmp_path) == [".gitignore", "b", "sub/b"]
    (tmp_path / ".awsddpignore").write_text("b\n.*ignore\n")
    assert names(tmp_path) == ["a", "sub/a"]


def test_an_ignore_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    make(tmp_path, "a", "b")
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert names(tmp_path) == [".gitignore", "b"]


def test_patterns_of_the_configuration_win_over_the_files(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", "sub/c")
    (tmp_path / ".gitignore").write_text("a\n.gitignore\n")
    assert names(tmp_path, "!a", "sub/") == ["a", "b"]


@pytest.mark.parametrize("below", ["", "a", "a/b"])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_ignored_is_what_git_ignores(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch, seed: int, below: str
) -> None:
    """Also of a folder in a repository, by .gitignore files above it, info/exclude and core.excludesFile."""
    dice = random.Random(seed)
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    parts = ["a", "b", "data", "x.log", "y.py", "keep"]
    for _ in range(30):
        path = "/".join(dice.choice(parts) for _ in range(dice.randint(1, 3)))
        if (
            not any((tmp_path / parent).is_file() for parent in Path(path).parents)
            and not (tmp_path / path).exists()
        ):
            make(tmp_path, path)
    pool = [
        "*.log",
        "/a",
        "data/",
        "!keep",
        "b/*",
        "!b/y.py",
        "**/x.log",
        "a/**/b",
        "data/**",
        "# no",
        "",
        "\\!odd",
        "k??p",
    ]
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        if folder == tmp_path or dice.random() < 0.4:
            (folder / ".gitignore").write_text("\n".join(dice.sample(pool, 4)) + "\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts)
    subprocess.run(["git", "-C", tmp_path, "add", "-f", *dice.sample(files, 4)], check=True)
    (tmp_path / ".git/info/exclude").write_text("y.py\n")
    everywhere = isolated / ".config/git/ignore"
    everywhere.parent.mkdir(parents=True)
    everywhere.write_text("!y.py\nkeep\n")
    git = ["git", "-C", tmp_path / below, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    expected = subprocess.run(git, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]
    found = files_to_send(tmp_path / below)
    if (
        not below
        or subprocess.run(["git", "-C", tmp_path, "check-ignore", "--no-index", "-q", below]).returncode
    ):
        assert sorted(e.path for e in found.entries if e.kind == "f") == sorted(expected)


def test_files_that_git_tracks_go_and_where_it_cannot_say_that_is_said(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / ".venv" / "project"
    make(project, "data/keep.csv", "data/other.csv", "a.py")
    (project / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    subprocess.run(["git", "-C", project, "add", "-f", "data/keep.csv"], check=True)
    assert names(project) == [".gitignore", "a.py", "data/keep.csv"]
    (project / ".git/index").write_bytes(b"no index")
    (skipped,) = files_to_send(project).skipped
    assert "git tracks" in skipped[0]
    assert "index" in skipped[1]


@pytest.mark.parametrize("kind", ["no git", "a work tree", "a submodule", "a name"])
def test_what_git_ignores_everywhere_stays_here(
    tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(isolated / "config"))
    everywhere = isolated / ("mine" if kind == "a name" else ".config/git/ignore")
    everywhere.parent.mkdir(parents=True, exist_ok=True)
    everywhere.write_text(".env\n")
    (isolated / "config").write_text("[core]\nexcludesFile = ~/mine\n" if kind == "a name" else "")
    make(tmp_path, "repo/proj/.env", "repo/proj/big.bin", "repo/proj/secret", "repo/proj/a.py")
    (tmp_path / "repo/.gitignore").write_text("/proj/big.bin\n")
    git = tmp_path / "repo/.git"
    subprocess.run(["git", "init", "-q", tmp_path / "repo"], check=True)
    (git / "info/exclude").write_text("secret\n")
    if kind != "a name":
        git.rename(tmp_path / "store")
        git.write_text(f"gitdir: {tmp_path}/store\n")
    if kind == "a work tree":
        make(tmp_path, "store/worktrees/w/HEAD")
        (tmp_path / "store/worktrees/w/commondir").write_text("../..\n")
        git.write_text("gitdir: ../store/worktrees/w\n")
    if kind == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    found = files_to_send(tmp_path / "repo/proj")
    assert [one.path for one in found.entries] == ["a.py"]
    by = dict(found.kept)
    assert by["big.bin"] == "../.gitignore"
    assert by[".env"] == f"~/{everywhere.relative_to(isolated)}"
    assert by["secret"].endswith("info/exclude")


def test_awsddpignore_takes_the_place_of_all_that_git_ignores(tmp_path: Path) -> None:
    make(tmp_path, "proj/a", "proj/b")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("a\n")
    assert names(tmp_path / "proj") == ["b"]
    (tmp_path / "proj/.awsddpignore").write_text("b\n")
    assert names(tmp_path / "proj") == [".awsddpignore", "a"]


def test_a_folder_that_its_repository_ignores_is_sent(tmp_path: Path) -> None:
    """As below a home folder that is a repository with "*" in its .gitignore."""
    make(tmp_path, "proj/deep/a")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for text in ("*\n", "/proj/\n"):
        (tmp_path / ".gitignore").write_text(text)
        assert names(tmp_path / "proj/deep") == ["a"]


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
    found = files_to_send(tmp_path)
    kinds = {entry.path: entry.kind for entry in found.entries}
    assert kinds == {"a": "f", "sub/b": "f", "sub/up": "l", "folder": "l", "dangling": "l", "loop": "l"}
    assert dict(found.skipped) == {"out": OUT, "far": OUT, "absolute": ASTRAY}


@pytest.mark.parametrize("text", ["../p/real", "sub/../../p/real", "../p/sub/../real", "beside/real"])
def test_a_link_into_the_folder_by_way_of_its_own_name_is_not_sent(tmp_path: Path, text: str) -> None:
    """On a node the folder has another name."""
    make(tmp_path, "p/real/f", "p/sub/g")
    (tmp_path / "p/beside").symlink_to("../p")
    (tmp_path / "p/data").symlink_to(text)
    found = files_to_send(tmp_path / "p")
    assert dict(found.skipped) == {"data": ASTRAY, "beside": ASTRAY}


def test_a_link_that_turns_within_the_folder_is_sent(tmp_path: Path) -> None:
    make(tmp_path, "real/f", "sub/deep/g")
    (tmp_path / "sub/data").symlink_to("deep/../../real")
    (tmp_path / "to").symlink_to("sub/data/f")
    found = files_to_send(tmp_path)
    assert (found.skipped, [one.path for one in found.entries if one.kind == "l"]) == ([], ["sub/data", "to"])


def test_what_is_neither_file_nor_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(tmp_path / "socket"))
        found = files_to_send(tmp_path)
    assert [path for path, _ in found.skipped] == ["pipe", "socket"]
    assert found.entries == []


def test_the_size_and_what_makes_it(tmp_path: Path) -> None:
    for path, size in {"data/a": 3000, "data/b": 4000, "big.bin": 5000, "small": 1}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * size)
    found = files_to_send(tmp_path)
    assert found.size == 12001
    assert found.largest(2) == (("data/", 7000), ("big.bin", 5000))


@pytest.mark.parametrize("place", ["/", "~", "~/.."])
def test_a_home_or_a_system_is_never_sent(isolated: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="folder to sync"):
        files_to_send(Path(place).expanduser())


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found"):
        files_to_send(tmp_path / "nope")


def test_far_too_much_is_refused_with_the_names_of_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, *(f"data/{number}" for number in range(20)))
    monkeypatch.setattr(project_files, "_MOST_FILES", 10)
    with pytest.raises(ConfigError, match="far too large") as caught:
        files_to_send(tmp_path)
    assert "data/" in caught.value.why
    assert ".awsddpignore" in caught.value.next


def test_a_pattern_that_is_none_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        files_to_send(tmp_path, ["!"])


def test_what_stays_here_is_named_with_what_keeps_it(tmp_path: Path) -> None:
    make(tmp_path, "a.pt", "data/x", "sub/log/y", "sub/z", "runs/j/x", "env/pyvenv.cfg", "own/k")
    (tmp_path / ".gitignore").write_text("/data\n*.pt\n")
    (tmp_path / "sub/.gitignore").write_text("log/\n")
    found = files_to_send(tmp_path, ["own"])
    assert dict(found.kept) == {
        "a.pt": ".gitignore",
        "data/": ".gitignore",
        "sub/log/": "sub/.gitignore",
        "own/": "sync.ignore",
        "env/": "awsddp",
        "runs/": "awsddp",
    }
    assert found.keeper("data/x") == found.keeper("data") == ("data/", ".gitignore")
    assert found.keeper("datab") is found.keeper("sub/z") is None
