"""Data that .gitignore keeps here and the script names: asked before anything is sent or launched."""

from pathlib import Path

import pytest

from awsddp.cli.command_line import Globals
from awsddp.cli.screen import Screen
from awsddp.job.unsynced_data import with_named_data
from awsddp.nodes.project_files import project_files
from awsddp.session.context import Session
from awsddp.settings.loader import load, words_of

READS = 'rows = open("data/train.csv").read()\n'


class Project:
    """A project folder, and who is asked about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.home = folder / "home"
        self.said: list[str] = []
        self.asked: list[str] = []
        self.folder.mkdir()

    def add(self, files: dict[str, str]) -> None:
        """Write files, by path."""
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def checked(self, answer: bool | None = None, *, nodes: int = 2, **keys: object) -> Session:
        """Return the session after the questions, each answered by `answer`."""
        given = {key.replace("__", "."): value for key, value in keys.items()}
        overrides = {
            "sync.workdir": str(self.folder),
            "cluster.nodes": nodes,
            "job.script": "train.py",
            **given,
        }
        known = {key: value for key, value in overrides.items() if value is not None}
        settings = load(environ={}, overrides=known)

        def ask(question: str) -> bool | None:
            self.asked.append(question)
            return answer

        session = Session(
            name="default",
            home=self.home,
            settings=settings,
            on_event=lambda event: self.said.append(event.text),
            ask=ask,
        )
        return with_named_data(session)

    def sent(self, session: Session) -> set[str]:
        """Return the paths that the nodes get."""
        return {one.path for one in project_files(session.job_spec, home=self.home).entries}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.add({"train.py": READS, "data/train.csv": "1,2,3", ".gitignore": "data/\n"})
    return made


def test_a_yes_sends_the_data_for_this_run_and_names_the_line_for_awsddp_toml(project: Project) -> None:
    session = project.checked(True)
    assert project.asked == ["data/ (5 bytes x 2 nodes) is in .gitignore and train.py mentions it: send it?"]
    assert project.sent(session) == {".gitignore", "data/train.csv", "train.py"}
    assert 'sync.ignore=["!/data/"]' in words_of(session.job_spec), "the job's record runs it again"
    assert project.said == ['data/: to answer for all jobs: ignore = ["!/data/"] in [sync] of awsddp.toml']


def test_a_no_keeps_it_here_and_the_line_that_it_names_answers_for_good(project: Project) -> None:
    assert project.sent(project.checked(False)) == {".gitignore", "train.py"}
    assert project.said == ['data/: to answer for all jobs: ignore = ["/data/"] in [sync] of awsddp.toml']
    project.asked.clear()
    project.checked(True, sync__ignore=["/data/"])
    assert not project.asked


def test_where_nobody_can_be_asked_a_line_warns_and_the_run_goes_on(project: Project) -> None:
    assert project.sent(project.checked(None)) == {".gitignore", "train.py"}
    assert project.said == [
        "data/ (5 bytes x 2 nodes) is in .gitignore and train.py mentions it: not sent; to send it: "
        'ignore = ["!/data/"] in [sync] of awsddp.toml'
    ]


@pytest.mark.parametrize("options", [{"yes": True}, {"json": True}, {}])
def test_a_screen_asks_nobody_with_yes_with_json_or_without_a_terminal(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: bool(options), raising=False)
    assert Screen(Globals(**options)).ask("send it?") is None


@pytest.mark.parametrize(
    ("files", "keys", "path"),
    [
        ({"train.py": "from pathlib import Path\nDATA = Path('data') / 'x'"}, {}, "data/"),
        ({"train.py": "open(f'data/{1}.csv')"}, {}, "data/"),
        ({"train.py": ""}, {"job__args": ["--data=data/train.csv"]}, "data/"),
        ({"train.py": ""}, {"job__args": ["--data", "./data"]}, "data/"),
        ({"tools/t.py": "open('../data/train.csv')"}, {"job__script": "tools/t.py"}, "data/"),
        ({"pkg/t.py": READS}, {"job__script": "pkg.t", "job__module": True}, "data/"),
        ({".gitignore": "*.csv\n"}, {}, "data/train.csv"),
        ({".gitignore": "*.csv\n", "train.py": "glob('data')"}, {}, "data/"),
        ({"train.py": "torch.load('w.pt')", "w.pt": "x", ".gitignore": "*.pt\n"}, {}, "w.pt"),
        (
            {"pkg/t.py": "from . import conf", "pkg/conf.py": "DATA = 'data/train.csv'"},
            {"job__script": "pkg.t", "job__module": True},
            "data/",
        ),
        (
            {"src/pkg/__main__.py": "import pkg.conf", "src/pkg/conf.py": "DATA = 'data/train.csv'"},
            {"job__script": "pkg", "job__module": True},
            "data/",
        ),
        ({"train.py": "import conf", "conf.py": "DATA = 'data/train.csv'"}, {}, "data/"),
        (
            {"train.py": "", "lightning_logs/v0/a.ckpt": "x", ".gitignore": "lightning_logs/\n"},
            {"job__args": ["lightning_logs/v0/a.ckpt"]},
            "lightning_logs/",
        ),
        (
            {"train.py": "load('logs/a.ckpt')", "logs/a.ckpt": "x", ".gitignore": "logs/\n"},
            {},
            "logs/",
        ),
    ],
)
def test_the_path_is_found_as_scripts_and_command_lines_name_it(
    project: Project, files: dict[str, str], keys: dict[str, object], path: str
) -> None:
    project.add(files)
    session = project.checked(True, nodes=1, **keys)
    assert [one.partition(" (")[0] for one in project.asked] == [path]
    assert "x 1" not in project.asked[0]
    assert any(one.startswith(path) for one in project.sent(session))


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        ({"train.py": '"""Reads data."""\nprint("no data here")'}, {}),
        ({"train.py": "this is ( no Python 'data'"}, {}),
        ({"train.py": "x = '\\d'; print('runs')", "runs/a/log": "x", ".gitignore": "runs/\n"}, {}),
        ({"train.py": "print('env2')", "env2/pyvenv.cfg": "x", ".gitignore": "env2/\n"}, {}),
        ({"train.py": "load('.env')", ".env": "KEY=1", ".gitignore": ".env\n"}, {}),
        ({"train.py": "init('wandb')", "wandb/x": "x", ".gitignore": "wandb/\n"}, {}),
        ({"train.py": "save('out')", "out/x": "x", ".gitignore": "out/\n"}, {"job__outputs": ["out"]}),
        ({"train.py": "save('out/x')", "out/y": "", ".gitignore": "out/\n"}, {}),
        ({}, {"sync__ignore": ["!/data/"]}),
        ({"train.py": READS}, {"job__script": None}),
    ],
)
def test_what_is_no_data_or_was_decided_is_not_asked(
    project: Project, files: dict[str, str], keys: dict[str, object], recwarn: pytest.WarningsRecorder
) -> None:
    project.add(files)
    project.checked(True, **keys)
    assert not (project.asked or project.said or recwarn.list)


def test_a_folder_of_many_files_is_counted_in_part(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("awsddp.job.unsynced_data._MOST_FILES", 3)
    project.add({f"data/{number}": "x" * 1_000_000 for number in range(6)})
    (project.folder / "data" / "train.csv").unlink()
    project.checked(True)
    assert project.asked[0].startswith("data/ (more than 3 MB x 2 nodes) is in")


def test_a_link_is_not_counted_as_data(project: Project, tmp_path: Path) -> None:
    project.add({".gitignore": "data\nmore/\n", "train.py": "open('data/x'), open('more/x')"})
    (project.folder / "data").rename(tmp_path / "far")
    (project.folder / "data").symlink_to(tmp_path / "far")
    (project.folder / "more").mkdir()
    (project.folder / "more" / "x").symlink_to(tmp_path / "far" / "train.csv")
    project.checked(True)
    assert not project.asked


def test_who_mentions_the_data_is_named(project: Project) -> None:
    project.add({"train.py": "import conf", "conf.py": "DATA = 'data/train.csv'"})
    project.checked(True)
    assert project.asked == ["data/ (5 bytes x 2 nodes) is in .gitignore and conf.py mentions it: send it?"]


LAST = "runs/train/exp/weights/last.pt"


@pytest.mark.parametrize(
    ("files", "keys", "path", "reason", "remedy"),
    [
        ({LAST: "x"}, {"job__args": ["--weights", LAST]}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x"}, {"job__args": [f"--weights=./{LAST}"]}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x", "train.py": f"load({LAST!r})"}, {}, LAST, "runs/ never is", f"cp -r {LAST} ."),
        ({LAST: "x"}, {"job__args": ["runs/train/exp"]}, "runs/train/exp", "runs/ never is", "cp -r runs/"),
        (
            {".awsddpignore": "data/\n", "data/train.csv": "x", "train.py": READS},
            {},
            "data/train.csv",
            "data/ is in .awsddpignore",
            "!/data/ in .awsddpignore",
        ),
        (
            {".awsddpignore": "*.pt\n", "w.pt": "x"},
            {"job__args": ["w.pt"]},
            "w.pt",
            "w.pt is in .awsddpignore",
            "!/w.pt in .awsddpignore",
        ),
        (
            {"w.pt": "x"},
            {"job__args": ["w.pt"], "sync__ignore": ["w.pt"]},
            "w.pt",
            "w.pt is in sync.ignore",
            "remove w.pt from sync.ignore",
        ),
    ],
)
def test_what_the_job_names_and_is_here_and_never_sent_is_reported(
    project: Project, files: dict[str, str], keys: dict[str, object], path: str, reason: str, remedy: str
) -> None:
    project.add({"train.py": "", **files})
    project.checked(None, **keys)
    (line,) = project.said
    assert line.startswith(
        f"{path} is here and is not sent ({reason}): a node has what an earlier job left there, or nothing; "
        f"to send it: {remedy}"
    )


def test_a_link_that_is_not_sent_and_that_an_argument_names_is_reported(project: Project) -> None:
    project.add({"train.py": "", "real/w.pt": "x"})
    (project.folder / "link").symlink_to(project.folder / "real")
    project.checked(None, job__args=["link/w.pt"])
    assert project.said[0].startswith("link/w.pt is here and is not sent (a link into the folder by a path")


@pytest.mark.parametrize(
    ("files", "args"),
    [
        ({"runs/a/log": "x"}, ["--project", "runs", "1", "-x", "", "--name="]),
        ({"w.pt": "x"}, ["w.pt", "train.py"]),
        ({}, ["runs/none.pt", "/etc/hostname", ".."]),
    ],
)
def test_what_is_sent_or_is_a_folder_of_results_is_not_reported(
    project: Project, files: dict[str, str], args: list[str]
) -> None:
    project.add({"train.py": "", **files})
    project.checked(None, job__args=args)
    assert not (project.said or project.asked)
