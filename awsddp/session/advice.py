"""Parse the commands in a message, so that options can be added to them before the message is shown.

Messages contain commands as the user types them ("awsddp up --nodes 2   # the note"), either on lines of
their own or within sentences.
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
    """A command on one cluster.

    `typed` is the text after the verb in the message. The other fields are added to the command: `options`
    select the cluster, `verb_options` are options of the verb, `script_words` are the script and its
    arguments.
    """

    verb: str
    typed: str = ""
    options: tuple[str, ...] = ()
    verb_options: tuple[str, ...] = ()
    script_words: tuple[str, ...] = ()

    @property
    def words(self) -> list[str] | None:
        """The words of `typed`, or None if a quote in `typed` is not closed."""
        try:
            return shlex.split(self.typed)
        except ValueError:
            return None

    def __str__(self) -> str:
        added = [shlex.join(self.options), self.verb, shlex.join(self.verb_options)]
        return " ".join(filter(None, ["awsddp", *added, self.typed, shlex.join(self.script_words)]))


@dataclass(frozen=True)
class Line:
    """Holds a message line's commands and the text between them.

    `is_typed` is True if the line consists of commands, joined as in a shell, and perhaps a note.
    """

    parts: tuple[Command | str, ...]
    note: tuple[Command | str, ...] = ()
    is_typed: bool = False

    def __str__(self) -> str:
        return "".join(map(str, (*self.parts, *self.note)))

    @property
    def has_commands(self) -> bool:
        """True if the line, including its note, contains a command."""
        return any(isinstance(part, Command) for part in (*self.parts, *self.note))

    def with_options(self, current: Sequence[str], after_down: Sequence[str] = ()) -> "Line":
        """Return the line with global options added to each command.

        Commands after a `down` get the options `after_down`, and so does `run`, because it creates a cluster.
        All other commands get the options `current`.
        """
        items = (*self.parts, *self.note)
        parts: list[Command | str] = []
        is_gone = False
        for index, part in enumerate(items):
            if isinstance(part, Command):
                following = items[index + 1] if index + 1 < len(items) else ""
                typed_words = f"{part.typed} {following if isinstance(following, str) else ''}".split()
                chosen = after_down if is_gone or (part.verb == "run" and after_down) else current
                is_repeated = "--local" in typed_words
                options = tuple(name for name in chosen if name != "--local" or not is_repeated)
                is_gone |= part.verb == "down"
                part = replace(part, options=options)
            parts.append(part)
        count = len(self.parts)
        return replace(self, parts=tuple(parts[:count]), note=tuple(parts[count:]))


def parse_message(text: str) -> list[Line]:
    """Return the lines of a message. A command that already has global options is plain text."""
    return [_read_line(line) for line in text.split("\n")]


def _read_line(line: str) -> Line:
    if not _TYPED.match(line):
        return Line(tuple(_commands_among(line)))
    commands, note, note_text = line.partition(_NOTE)
    parts = [
        Command(match[1], match[2].strip()) if (match := _TYPED.fullmatch(part)) else part
        for part in re.split(r"( && |; )", commands)
    ]
    return Line(tuple(parts), (note, *_commands_among(note_text)), is_typed=True)


def _commands_among(text: str) -> Iterator[Command | str]:
    """Yield the commands in a text, and the text between them."""
    end = 0
    for match in _COMMAND.finditer(text):
        yield from (text[end : match.start()], Command(match[1]))
        end = match.end()
    yield text[end:]
