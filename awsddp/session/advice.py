"""Advice as a value: lines of commands to type, each with a note, or of words around commands.

Messages write a command as it is typed, "awsddp up --nodes 2   # the note". It is read here, once; what a
user has to type beside it is added to the value, which is rendered once.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from awsddp.settings.verbs import HEEDS

_COMMAND = re.compile(rf"\bawsddp ({'|'.join(HEEDS)})\b")
_TYPED = re.compile(rf"awsddp ({'|'.join(HEEDS)})((?: .*)?)")
_NOTE = "   #"


@dataclass(frozen=True)
class Command:
    """A command on one cluster. `typed` is what the message has after the verb; the rest is added: `options`
    select the cluster, `asked` are options of the verb, `last` is the script with its arguments.
    """

    verb: str
    typed: str = ""
    options: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    @property
    def words(self) -> list[str] | None:
        """The words that are typed; None where a quote ends in another command."""
        try:
            return shlex.split(self.typed)
        except ValueError:
            return None

    def __str__(self) -> str:
        added = [shlex.join(self.options), self.verb, shlex.join(self.asked)]
        return " ".join(filter(None, ["awsddp", *added, self.typed, shlex.join(self.last)]))


@dataclass(frozen=True)
class Line:
    """A line of advice: commands, and what stands between them. One that `is_typed` is commands alone, joined
    as in a shell, and a note.
    """

    parts: tuple[Command | str, ...]
    note: tuple[Command | str, ...] = ()
    is_typed: bool = False

    def __str__(self) -> str:
        return "".join(map(str, (*self.parts, *self.note)))

    @property
    def has_commands(self) -> bool:
        """Whether it names a command, in the note or before."""
        return any(isinstance(part, Command) for part in (*self.parts, *self.note))

    def with_options(self, kept: Sequence[str], anew: Sequence[str] = ()) -> "Line":
        """Return the line with these global options in each command: `kept` while there is the cluster,
        `anew` after a `down`, and for `run`, which brings its own cluster up.
        """
        every = (*self.parts, *self.note)
        parts: list[Command | str] = []
        is_gone = False
        for at, part in enumerate(every):
            if isinstance(part, Command):
                after = every[at + 1] if at + 1 < len(every) else ""
                given = f"{part.typed} {after if isinstance(after, str) else ''}".split()
                chosen = anew if is_gone or (part.verb == "run" and anew) else kept
                options = tuple(word for word in chosen if word != "--local" or word not in given)
                is_gone |= part.verb == "down"
                part = replace(part, options=options)
            parts.append(part)
        count = len(self.parts)
        return replace(self, parts=tuple(parts[:count]), note=tuple(parts[count:]))


def read_advice(text: str) -> list[Line]:
    """Return the lines of a message. A command that has global options already is left as it is."""
    return [_read_line(line) for line in text.split("\n")]


def _read_line(line: str) -> Line:
    if not _TYPED.match(line):
        return Line(tuple(_commands_among(line)))
    commands, note, rest = line.partition(_NOTE)
    parts = [
        Command(found[1], found[2].strip()) if (found := _TYPED.fullmatch(part)) else part
        for part in re.split(r"( && |; )", commands)
    ]
    return Line(tuple(parts), (note, *_commands_among(rest)), is_typed=True)


def _commands_among(text: str) -> Iterator[Command | str]:
    """Yield the commands that words name, and the words."""
    at = 0
    for found in _COMMAND.finditer(text):
        yield from (text[at : found.start()], Command(found[1]))
        at = found.end()
    yield text[at:]
