"""Records the pictures of a terminal in docs/: real commands on a local cloud of its own, in 80 columns.

python tools/recording.py

Writes docs/commands-{light,dark}.svg (up, train, down) and docs/hang-{light,dark}.svg (doctor --why) within
two minutes.
"""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
AWSDDP = Path(sys.executable).parent / "awsddp"
COLUMNS, LINES = 80, 400
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
_NAMES = {"brown": "yellow"}  # as pyte and rich call it

TRAIN = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(1, 6):
    for _ in range(50):
        x = torch.randn(64, 20)
        y = (x.sum(1) > 0).long()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        torch.save(model.module.state_dict(), "model.pt")
"""
HANGS = """\
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1000):
    if step == 20 and dist.get_rank() == 3:
        time.sleep(3600)  # as a data loader on a dead mount
    dist.all_reduce(torch.ones(1))
    if step % 10 == 0 and dist.get_rank() == 0:
        print("step", step, flush=True)
"""


class Terminal:
    """A terminal of 80 columns that remembers all lines."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)

    def run(self, command: str) -> None:
        """Type a command of awsddp, and show what it writes to a terminal. Raises CalledProcessError."""
        self._stream.feed(f"\x1b[1m$ {command}\x1b[0m\r\n".encode())
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self._folder)
            os.execve(AWSDDP, command.split(), self._environ)
        os.set_blocking(terminal, True)
        subprocess.run(["stty", "rows", "50", "columns", str(COLUMNS)], stdin=terminal, check=True)
        while data := _read(terminal):
            self._stream.feed(data)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise subprocess.CalledProcessError(code, command, output="\n".join(self._screen.display))
        self._stream.feed(b"\r\n")

    def save(self, name: str, title: str) -> None:
        """Write what is on the screen as docs/NAME-light.svg and docs/NAME-dark.svg."""
        for theme, colors in THEMES.items():
            console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115
            for number in range(self._screen.cursor.y):
                console.print(self._line(number), soft_wrap=True, end="\n")
            (ROOT / "docs" / f"{name}-{theme}.svg").write_text(
                console.export_svg(title=title, theme=colors, code_format=_format(), unique_id=name)
            )

    def _line(self, number: int) -> Text:
        text = Text()
        cells = self._screen.buffer[number]
        for column in range(max(cells, default=-1) + 1):
            cell = cells[column]
            color = _NAMES.get(cell.fg, cell.fg.replace("bright", "bright_"))
            style = Style(color=None if color == "default" else color, bold=cell.bold, dim=False)
            text.append(cell.data, style)
        text.rstrip()
        return _joined(text)


def _joined(text: Text) -> Text:
    """Return a text with one span for each run of cells of the same style."""
    joined = Text()
    for style, spans in groupby(text.spans, key=lambda span: span.style):
        joined.append("".join(text.plain[span.start : span.end] for span in spans), style)
    return joined


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the command has ended
        return b""


def _format() -> str:
    """Return rich's form of an SVG without the fonts that it would load from elsewhere."""
    from rich._export_format import CONSOLE_SVG_FORMAT

    return re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def hangs(why: dict[str, Any]) -> bool:
    """Tell whether ranks wait in a collective that began a while ago."""
    return not why["moving"] and any(rank["collective"] for rank in why["ranks"])


def main() -> None:
    """Record both pictures."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "project")
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        (folder / "hangs.py").write_text(HANGS)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS", "NO_COLOR"))}
        environ = clean | {"AWSDDP_HOME": f"{top}/home", "TERM": "xterm-256color"}
        commands, hang = Terminal(folder, environ), Terminal(folder, environ)

        def quiet(*words: str) -> bytes:
            """Run a command of awsddp that no picture shows."""
            return subprocess.run([AWSDDP, *words], cwd=folder, env=environ, capture_output=True).stdout

        try:
            commands.run("awsddp up --local --nodes 2 --instance-type g6.xlarge -y")
            commands.run("awsddp train train.py --world-size 2 --name first")
            commands.run("awsddp down -y")
            quiet("up", "--local", "--nodes", "2", "--instance-type", "g6.12xlarge", "-y")
            hang.run("awsddp train hangs.py --world-size 4 --name second --detach")
            while not hangs(json.loads(quiet("doctor", "--why", "second", "--json"))):
                time.sleep(1)
            hang.run("awsddp doctor --why second")
            quiet("cancel", "second")
            quiet("down", "-y")
        finally:
            quiet("local", "stop")
        commands.save("commands", "awsddp: up, train, down")
        hang.save("hang", "awsddp: which rank the others wait for")


if __name__ == "__main__":
    main()
