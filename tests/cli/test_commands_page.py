"""docs/commands.md is what `--help` says: rewritten by `python -m tests.cli.test_commands_page`."""

import functools
import os
import subprocess
import sys
from pathlib import Path

from awsddp.cli.main import VERBS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
GROUPS = {
    ("local",): ("start", "status", "stop", "fault"),
    ("local", "fault"): ("add", "list", "clear"),
}

HEAD = """\
# Commands

What `awsddp VERB --help` says, a verb a section. Rewritten from the program itself
(`python -m tests.cli.test_commands_page`), and a test holds the two together.

Completion of words in the shell, for a line in its startup file:

```
bash   eval "$(_AWSDDP_COMPLETE=bash_source awsddp)"
zsh    eval "$(_AWSDDP_COMPLETE=zsh_source awsddp)"
fish   _AWSDDP_COMPLETE=fish_source awsddp | source
```

Ctrl-C leaves in good order: `train` ends its job and brings home what it made, `run` ends everything, any
other verb leaves at once; each says what still costs money and which command ends it. A second Ctrl-C leaves
at once.
A closed terminal, SIGTERM, and a reader that goes away (`| head`) leave the job of `train` running.
"""


@functools.cache
def page() -> str:
    sections = [HEAD, _section()]
    sections += [_section(verb) for verb in VERBS]
    sections += [_section(*group, verb) for group, verbs in GROUPS.items() for verb in verbs]
    return "\n".join(sections)


def _section(*words: str) -> str:
    environ = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    shown = subprocess.run(
        [sys.executable, "-m", "awsddp", *words, "--help"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return f"## {' '.join(('awsddp', *words))}\n\n```\n{shown.stdout.rstrip()}\n```\n"


def test_the_page_of_commands_is_what_help_says() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.cli.test_commands_page"


def test_no_help_page_shows_more_than_16_options() -> None:
    for section in page().split("\n## ")[2:]:
        options = [line for line in section.splitlines() if line.startswith("  -") and "--help" not in line]
        assert len(options) <= 16 or section.startswith("awsddp run"), section


if __name__ == "__main__":
    PAGE.write_text(page())
