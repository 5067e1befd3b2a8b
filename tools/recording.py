"""Record the animation of docs/: real commands on a local cloud, in a terminal of 80 columns and 20 rows.

python tools/recording.py

Writes docs/recording-{light,dark}.svg in three minutes. The animation takes 20 s, because waits are
shortened; no line is changed. CSS in the file sets the colors and the motion. If the viewer's browser prefers
reduced motion, it shows a still picture of the hang.
"""

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 80, 20
CELL, LINE, MARGIN, BAR = 8.4, 18, 16, 34
LONGEST_WAIT_S, SHORTEST_FRAME_S, TYPING_S = 0.5, 0.12, 0.6


@dataclass(frozen=True)
class Scene:
    """A command and its title. The scene takes `seconds`, of which `read` seconds follow the command's
    end."""

    title: str
    command: str
    seconds: float
    read: float
    code: int = 0
    still: bool = False


WHY = "why"
UP = Scene(
    "Rehearse: two hosts on this machine, no AWS account, no GPU, no cost",
    "awsddp up --local --nodes 2 --instance-type g6.xlarge -y",
    4.5,
    1.5,
)
TRAIN = Scene("Train; then rank 1 is killed on its node (kill -9)", "awsddp train train.py", 6.5, 3, code=1)
HANG = Scene("Another job hangs: which rank, and at which line?", f"awsddp {WHY} hangs", 5.5, 4.5, still=True)
DOWN = Scene("End everything: searched again until nothing is left", "awsddp down -y", 3.5, 2)
FOOTER = "Recorded on the local cloud; waits are shortened."

TRAIN_PY = """\
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
open("pid", "w").write(str(os.getpid()))
for epoch in range(1, 100):
    for _ in range(50):
        x = torch.randn(64, 20)
        y = (x.sum(1) > 0).long()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        torch.save(model.module.state_dict(), "model.pt")
    time.sleep(2.5)
"""
HANGS_PY = """\
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1000):
    if step == 20 and dist.get_rank() == 1:
        time.sleep(3600)  # a data loader on a dead mount
    dist.all_reduce(torch.ones(1))
"""

THEMES = {
    "light": {
        "page": "#ffffff", "bar": "#f6f8fa", "rule": "#d0d7de", "text": "#1f2328", "muted": "#57606a",
        "red": "#cf222e", "green": "#116329", "brown": "#7d4e00", "blue": "#0550ae", "magenta": "#8250df",
        "cyan": "#1b7c83",
    },
    "dark": {
        "page": "#0d1117", "bar": "#161b22", "rule": "#3d444d", "text": "#e6edf3", "muted": "#9198a1",
        "red": "#ff7b72", "green": "#3fb950", "brown": "#d29922", "blue": "#58a6ff", "magenta": "#bc8cff",
        "cyan": "#39c5cf",
    },
}  # fmt: skip

Row = tuple[tuple[int, str, str, bool], ...]  # runs of cells: first column, text, color, is bold
Screen = tuple[Row, ...]


class Recorder:
    """Runs scenes in a folder, and stores the frames of their terminals: (title, still, screen, seconds)."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self.frames: list[tuple[str, bool, Screen, float]] = []

    def quiet(self, *words: str) -> bytes:
        """Run a command of awsddp that is not shown, and return its stdout."""
        command = [sys.executable, "-m", "awsddp", *words]
        return subprocess.run(command, cwd=self._folder, env=self._environ, capture_output=True).stdout

    def play(self, scene: Scene, *, at: str = "", then: Callable[[], object] = lambda: None) -> None:
        """Run a scene's command; `then` is called once the screen has the text `at`. Raises RuntimeError."""
        screen = pyte.Screen(COLUMNS, ROWS)
        stream = pyte.ByteStream(screen)
        typed = []
        for word in f"$ {scene.command}".split(" "):
            stream.feed(f"\x1b[1m{word}\x1b[0m ".encode())
            typed.append(_read_screen(screen))
        stream.feed(b"\r\n")
        states: list[tuple[float, Screen]] = [(time.monotonic(), typed[-1])]
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self._folder)
            words = [sys.executable, "-m", *scene.command.split()]
            os.execve(sys.executable, words, self._environ)
        subprocess.run(["stty", "rows", str(ROWS), "columns", str(COLUMNS)], stdin=terminal, check=True)
        while data := _read(terminal):
            stream.feed(data)
            states.append((time.monotonic(), _read_screen(screen)))
            if at and at in "\n".join(screen.display):
                at = ""
                then()
        states.append((time.monotonic(), states[-1][1]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != scene.code or at:
            raise RuntimeError(f"exit code {code} of:\n" + "\n".join(screen.display))
        for state in typed:
            self.frames.append((scene.title, False, state, TYPING_S / len(typed)))
        for state, seconds in _shorten(states, scene.seconds - scene.read - TYPING_S):
            self.frames.append((scene.title, False, state, seconds))
        self.frames.append((scene.title, scene.still, states[-1][1], scene.read))


def _shorten(states: list[tuple[float, Screen]], seconds: float) -> Iterator[tuple[Screen, float]]:
    """Yield screens and their durations, which add up to at most `seconds`.

    Long waits are shortened first; then all durations are scaled.
    """
    waits = [(screen, min(end - start, LONGEST_WAIT_S)) for (start, screen), (end, _) in pairwise(states)]
    scale = min(1.0, seconds / max(sum(wait for _, wait in waits), 0.01))
    frame_s = 0.0
    for screen, wait in waits:
        frame_s += wait * scale
        if frame_s >= SHORTEST_FRAME_S:
            yield screen, frame_s
            frame_s = 0.0


def _read_screen(screen: pyte.Screen) -> Screen:
    """Return the rows of a terminal, each as runs of cells of one style."""
    rows = []
    for number in range(ROWS):
        cells, runs = screen.buffer[number], []
        columns = range(len(screen.display[number].rstrip()))
        for (color, bold), run in groupby(columns, key=lambda column: (cells[column].fg, cells[column].bold)):
            run_columns = list(run)
            text = "".join(cells[column].data for column in run_columns)
            if text.strip():
                runs.append((run_columns[0], text, color.removeprefix("bright"), bold))
        rows.append(tuple(runs))
    return tuple(rows)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the command has ended
        return b""


def drawn(frames: list[tuple[str, bool, Screen, float]], colors: dict[str, str]) -> str:
    """Return the SVG: all frames in a vertical strip, and a window that steps from each to the next."""
    width, height = round(COLUMNS * CELL + 2 * MARGIN), BAR + ROWS * LINE + 12
    total, start, still = sum(frame[3] for frame in frames), 0.0, 0
    ids: dict[Row, str] = {}
    steps, strip = [], []
    for number, (title, is_still, screen, seconds) in enumerate(frames):
        top = number * height
        steps.append(f"{start / total:.3%}{{transform:translateY({-top}px)}}")
        start, still = start + seconds, number if is_still else still
        strip.append(f'<text x="{MARGIN}" y="{top + 22}" class="title text">{escape(title)}</text>')
        for line, row in enumerate(screen):
            if row:
                y = top + BAR + (line + 1) * LINE
                strip.append(f'<use href="#{ids.setdefault(row, f"r{len(ids)}")}" y="{y}"/>')
    rows = "".join(f'<g id="{name}">{"".join(map(_run, row))}</g>' for row, name in ids.items())
    style = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
    size, rule, right = f"{width} {height + BAR}", colors["rule"], width - 9
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" height="{height + BAR}">
<style>{style}
text{{white-space:pre;font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
.title,.foot{{font:13px system-ui,sans-serif}}.title{{font-weight:600}}.b{{font-weight:700}}
.play{{transform:translateY({-still * height}px)}}
@media (prefers-reduced-motion:no-preference){{.play{{animation:play {total:.1f}s step-end infinite}}}}
@keyframes play{{{"".join(steps)}}}</style>
<defs>{rows}</defs>
<rect x="1" y="1" width="{width - 2}" height="{height + BAR - 2}" rx="8" class="page"/>
<path d="M2,{BAR}V9a7,7 0 0 1 7,-7H{right}a7,7 0 0 1 7,7V{BAR}z" class="bar"/>
<g fill="none" stroke="{rule}"><path d="M1,{BAR}H{width - 1}M1,{height}H{width - 1}"/>
<rect x="1" y="1" width="{width - 2}" height="{height + BAR - 2}" rx="8" stroke-width="2"/></g>
<svg width="{width}" height="{height}"><g class="play">{"".join(strip)}</g></svg>
<text x="{MARGIN}" y="{height + 22}" class="foot muted">{FOOTER}</text>
</svg>
"""


def _run(run: tuple[int, str, str, bool]) -> str:
    column, text, color, bold = run
    kind = f"{'text' if color in ('default', 'white', 'black') else color}{' b' * bold}"
    position = f'x="{MARGIN + column * CELL:.1f}" textLength="{len(text) * CELL:.1f}"'
    return f'<text {position} class="{kind}">{escape(text)}</text>'


def main() -> None:
    """Record all scenes, and write the SVG files."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "project")
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN_PY)
        (folder / "hangs.py").write_text(HANGS_PY)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS", "NO_COLOR"))}
        environ = clean | {"AWSDDP_HOME": f"{top}/home", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        recorder = Recorder(folder, environ)
        try:
            recorder.play(UP)
            kill = "kill -9 $(cat pid)"
            recorder.play(TRAIN, at="epoch 5", then=lambda: recorder.quiet("exec", "--node", "1", kill))
            recorder.quiet("train", "hangs.py", "--name", "hangs", "--detach")
            why: dict[str, Any] = {"moving": True}
            while why["moving"] or not any(rank["collective"] for rank in why["ranks"]):
                time.sleep(1)
                why = json.loads(recorder.quiet(*WHY.split(), "hangs", "--json"))
            recorder.play(HANG)
            recorder.quiet("cancel", "hangs")
            recorder.play(DOWN)
        finally:
            recorder.quiet("local", "stop")
    for theme, colors in THEMES.items():
        (ROOT / "docs" / f"recording-{theme}.svg").write_text(drawn(recorder.frames, colors))


if __name__ == "__main__":
    main()
