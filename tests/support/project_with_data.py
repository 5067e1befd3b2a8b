"""A project whose data .gitignore excludes from sync, and the questions about it."""

from pathlib import Path

import pytest

from awsddp.job.unsynced_data import ask_about_unsynced_data
from awsddp.nodes.project_files import list_project_files
from awsddp.session.context import Session
from awsddp.settings.loader import load

READS = 'rows = open("data/train.csv").read()\n'


class Project:
    """A project folder, and the questions about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.home = folder / "home"
        self.messages: list[str] = []
        self.questions: list[str] = []
        self.folder.mkdir()

    def add(self, files: dict[str, str]) -> None:
        """Write files, by path."""
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def answer_questions(self, answer: bool | None = None, *, nodes: int = 2, **keys: object) -> Session:
        """Return the session after all questions were answered by `answer`."""
        values = {key.replace("__", "."): value for key, value in keys.items()}
        overrides = {
            "sync.workdir": str(self.folder),
            "cluster.nodes": nodes,
            "job.script": "train.py",
            **values,
        }
        without_none = {key: value for key, value in overrides.items() if value is not None}
        settings = load(environ={}, overrides=without_none)

        def ask(question: str) -> bool | None:
            self.questions.append(question)
            return answer

        session = Session(
            name="default",
            home=self.home,
            settings=settings,
            on_event=lambda event: self.messages.append(event.text),
            ask=ask,
        )
        return ask_about_unsynced_data(session)

    def synced_paths(self, session: Session) -> set[str]:
        """Return the paths that sync sends to the nodes."""
        return {entry.path for entry in list_project_files(session.job_spec, awsddp_home=self.home).entries}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.add({"train.py": READS, "data/train.csv": "1,2,3", ".gitignore": "data/\n"})
    return made
