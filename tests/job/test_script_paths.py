"""The data that a job names in its script, its modules or its arguments."""

import pytest

from tests.support.project_with_data import READS, Project


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
def test_data_is_found_in_scripts_modules_and_arguments(
    project: Project, files: dict[str, str], keys: dict[str, object], path: str
) -> None:
    project.add(files)
    session = project.answer_questions(True, nodes=1, **keys)
    assert [question.partition(" (")[0] for question in project.questions] == [path]
    assert "x 1" not in project.questions[0]
    assert any(name.startswith(path) for name in project.synced_paths(session))


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
def test_paths_that_are_not_data_or_were_decided_are_not_asked(
    project: Project, files: dict[str, str], keys: dict[str, object], recwarn: pytest.WarningsRecorder
) -> None:
    project.add(files)
    project.answer_questions(True, **keys)
    assert not (project.questions or project.messages or recwarn.list)


def test_the_question_names_the_file_that_mentions_the_data(project: Project) -> None:
    project.add({"train.py": "import conf", "conf.py": "DATA = 'data/train.csv'"})
    project.answer_questions(True)
    assert project.questions == [
        "data/ (5 bytes x 2 nodes) is in .gitignore and conf.py mentions it: send it?"
    ]
