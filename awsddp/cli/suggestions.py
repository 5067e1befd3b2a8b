"""What a wrong command line meant: by the habits of other tools first (slips.toml), by edit distance last.

What is advised starts nothing without a question: no -y of the user goes to another verb, and an option that
limits time or cost stays one. Imported only where a command line is wrong.
"""

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from awsddp.cli.options import dashed
from awsddp.errors import UsageError
from awsddp.settings.spec import KEYS
from awsddp.settings.values import VARIABLE
from awsddp.settings.verbs import HEEDS
from awsddp.util.shipped_files import template

WORDS = "awsddp.words"
"""Where a context keeps the words from the verb on."""
_PLACES = ("-c", "--cluster", "--region", "--profile")
"""The options that stand before each verb of an answer."""
_GLOBAL = ("--local", "-o")
"""The other options that a second command of an answer needs, too."""
_YES = ("-y", "--yes")
_LIMITS = ("--budget", "--idle", "--expires", "--timeout")
"""Options of which even a misspelled one never goes to a script."""
_OF_A_PLAN = ("job.world_size", "job.nproc_per_node")
"""Keys of a job that a plan heeds: the GPUs of a node are counted by them."""
_ONLY_READS = ("status", "jobs", "logs", "why")
_ASKS_OR_ONLY_READS = ("up", "plan", *_ONLY_READS, "exec", "ssh", "doctor")
_FILES = (".py", ".sh")
_CLUSTER = re.compile(r"[a-z][a-z0-9-]{0,30}")
_AMOUNT = re.compile(r"\d+[smhd]?")
_ASSIGNMENT = re.compile(VARIABLE.pattern + "=.*", re.ASCII | re.DOTALL)
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class _Typed:
    """Words behind a verb: options of awsddp and what the verb is about, in their order, then the script's.

    Each of `ours` is an option's name with its words, or "" with a script or job.
    """

    ours: list[tuple[str, list[str]]]
    theirs: list[str] = field(default_factory=list)
    left_out: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """What the verb is about: a script, jobs."""
        return [word for name, words in self.ours if not name for word in words]

    def only(self, names: Iterable[str]) -> list[str]:
        """Return the words of these options; "" is what is no option."""
        chosen = {*names}
        return [word for name, words in self.ours if name in chosen for word in words]


def meant(error: click.UsageError, typed: Sequence[str]) -> UsageError:
    """Return the error that says what is wrong with the words `typed`, and what to type."""
    ctx = error.ctx or click.Context(click.Command("awsddp"))
    verb, *args = ctx.meta.get(WORDS, ("",))
    before = [*typed[: len(typed) - len(args) - 1]]
    if verb == "sky" and args:  # its verbs are in the table
        verb, *args = args
    places, args = _places(args)
    before += places
    slip = _Slip(ctx.find_root(), verb)
    message, why, commands = error.format_message(), "", [""]
    if isinstance(error, click.NoSuchOption):
        at = [*map(_name, args), error.option_name].index(error.option_name)
        shown = [*args, error.option_name][at].partition("=")[0]
        message = f"{shown} is not an option of {ctx.command_path}"
        if verb:
            why, commands = slip.of_option(args, at, error.option_name)
    elif type(error) is click.UsageError:
        why, commands = slip.of_words(args)
    if not any(commands) or "\n" in "".join([*before, *commands]):  # which nobody types
        return UsageError(message, why, f"{ctx.command_path} --help")
    if any(" -- " in one for one in commands) and "--" not in args:
        why = "; ".join(filter(None, (why, "arguments of your script go after --")))
    is_same = len(commands) == 1 and commands[0].split(maxsplit=1)[:1] == [verb] and " && " not in commands[0]
    before = before if is_same else [word for word in before if word not in _YES]
    return UsageError(message, why, "\n".join(_line(before, one) for one in commands))


def starts_ranks(words: Sequence[str]) -> bool:
    """Return whether words are the command line of a launcher: torchrun, python, mpirun; a shell's variables
    may stand before it, or before a script.
    """
    at = next((at for at, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    names = _table()["launchers"]["names"].split()
    return at < len(words) and (Path(words[at]).name in names or (at > 0 and words[at].endswith(_FILES)))


def _places(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the options that select a cluster, and the other words."""
    end = args.index("--") if "--" in args else len(args)
    at = next((at for at, word in enumerate(args[: end - 1]) if word in _PLACES), None)
    if at is None:
        return [], args
    more, rest = _places([*args[:at], *args[at + 2 :]])
    return [*args[at : at + 2], *more], rest


def _table() -> dict[str, Any]:
    return tomllib.loads(template("slips.toml"))


def _name(word: str) -> str:
    return dashed(word.partition("=")[0])


def _line(before: list[str], text: str) -> str:
    """Return a command, and what stands behind `&&`, with the global options typed before the verb."""
    if text.startswith("$ "):
        return text.removeprefix("$ ")
    command, mark, comment = text.partition("   #")
    return (
        " && ".join(f"{shlex.join(['awsddp', *before])} {one}" for one in command.split(" && "))
        + mark
        + comment
    )


def _takes_value(command: click.Command) -> dict[str, str]:
    """Return the options of a command, each with what stands for its value, "" where it has none."""
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {
        name: "" if one.is_flag or one.count else (one.metavar or "VALUE").partition("|")[0]
        for one in options
        for name in one.opts
    }


class _Slip:
    """A wrong command line of a verb, which may be one of another tool."""

    def __init__(self, ctx: click.Context, verb: str) -> None:
        root: Any = ctx.command
        commands = {name: root.get_command(ctx, name) for name in (*HEEDS, "init")} if verb else {}
        self.verb = verb
        self.takes = {name: _takes_value(one) for name, one in commands.items()}
        self.table = _table()

    def parted(self, verb: str, words: Sequence[str]) -> _Typed:
        """Return words with the script's arguments apart: options that no verb of ours has, and what follows
        the script. Short ones are those of `verb` alone.
        """
        known = {
            name: value for takes in self.takes.values() for name, value in takes.items() if name[1] == "-"
        }
        known |= self.takes.get(verb, {})
        ours: list[tuple[str, list[str]]] = []
        rest: list[str] = []
        left, has_script = iter(words), False
        for word in left:
            name = _name(word) if _name(word) in known else word[:2]
            is_value = bool(rest) and rest[-1].startswith("-") and "=" not in rest[-1]
            if word == "--":
                rest += left
            elif name in known:
                value = [next(left, known[name])] if known[name] and dashed(word) == name else []
                ours.append((name, [word, *value]))
            elif word.startswith("-") or has_script or (is_value and not word.endswith(_FILES)):
                rest.append(word)
            else:
                ours.append(("", [word]))
                has_script = True
        return _Typed(ours, rest)

    def of_words(self, args: list[str]) -> tuple[str, list[str]]:
        """Return why, and the commands, for a verb of another tool, or words that a verb does not take."""
        verb = self.verb
        commands = {word: text for text, words in self.table["commands"].items() for word in words.split()}
        if (starts_ranks([verb]) and args) or (
            verb in ("train", "run") and self._launcher_at(args) is not None
        ):
            return self._launched(commands.get(verb, f"{verb} SCRIPT"), args)
        for word in ("/".join([verb, *args[:1]]), verb):
            if word in commands:
                is_file = verb in ("plan", "up") and any(one.endswith(_FILES) for one in args)
                return "a script is of awsddp train, run" * is_file, self._filled(commands[word], args)
        if verb.endswith(_FILES):
            return "", self._filled("train SCRIPT", [verb, *args])
        near = [one for one in difflib.get_close_matches(verb, HEEDS, n=1, cutoff=0.8) if one != verb]
        return "", [shlex.join([*near, *args]) if near else ""]

    def of_option(self, args: list[str], at: int, option: str) -> tuple[str, list[str]]:
        """Return why, and the commands that were meant with `option`; it is `args[at]`, unless one of several
        (-it).
        """
        verb, takes = self.verb, self.takes.get(self.verb, {})
        if verb in ("train", "run") and self._launcher_at(args) is not None:
            return self._launched(f"{verb} SCRIPT", args)
        rest = list(args)
        _, equals, value = rest.pop(at).partition("=") if at < len(args) else ("", "", "")
        if not equals and rest[at : at + 1] and not rest[at].startswith("-"):
            value = rest.pop(at)
        owners = [name for name, names in self.takes.items() if option in names and option.startswith("--")]
        texts = [text for text, words in self.table["options"].items() if {verb, option} <= {*words.split()}]
        if option == "--gpus" and verb == "train" and value.isdigit():
            texts = ["--nproc-per-node"]
        if not texts and not owners:
            texts = difflib.get_close_matches(option, takes, n=1, cutoff=0.82)  # not --model
            if not texts and (limits := difflib.get_close_matches(option, _LIMITS, n=1, cutoff=0.82)):
                return self.of_option(self._replaced(args, at, limits[0]), at, limits[0])
        heeded = (*HEEDS.get(verb, ()), *_OF_A_PLAN * (verb == "plan"))
        keys = {dashed(f"--{key.partition('.')[2]}"): key for key in KEYS if key.startswith(heeded)}
        texts += [f"-o {keys[one]}=" for one in (option, f"{option}-usd") if one in keys and takes]
        why = f"it is an option of awsddp {', '.join(owners)}" if owners else ""
        if not texts:
            if verb in ("train", "run"):
                return why, self._with_script(verb, self.parted(verb, args))
            return why, self._of_another(owners, args, option, value) if owners else [""]
        text = texts[0]
        if text[:1] not in ("", "-"):
            return "", self._filled(text, [*filter(None, (value,)), *rest])
        if text.endswith("="):
            text, value = text[:2], f"{text[3:]}{value or 'VALUE'}"
        text, _, fixed = text.partition(" ")
        value = fixed or value
        rest[at:at] = [] if text == "-" else filter(None, (text, value or takes.get(text, "")))
        if verb in ("train", "run"):  # there may be more that is wrong
            return why, self._with_script(verb, self.parted(verb, rest))
        return why, [shlex.join([verb, *rest])]

    @staticmethod
    def _replaced(args: list[str], at: int, option: str) -> list[str]:
        _, equals, value = args[at].partition("=")
        return [*args[:at], option + equals + value, *args[at + 1 :]]

    def _of_another(self, owners: list[str], args: list[str], option: str, value: str) -> list[str]:
        """Return the commands for an option of other verbs, typed with one that is no launch."""
        typed = self.parted(self.verb, args)
        if self.verb in ("up", "plan") and "train" in owners:
            own = typed.only(self.takes[self.verb].keys() - {*_YES})
            twin = ["--expires", value] if option == "--timeout" and value else []
            train = ["train", *typed.only({*self.takes["train"]} - {*_YES, *self.takes[self.verb]})]
            return [f"{shlex.join([self.verb, *own, *twin])}   # then:", shlex.join(train)]
        if "up" in owners:  # who looks, or ends nodes, is led to no launch
            if self.verb not in _ONLY_READS:
                return [f"{self.verb} --help"]
            return [shlex.join([self.verb, *typed.only({"", *self.takes[self.verb]})])]
        owner = next((one for one in _ASKS_OR_ONLY_READS if one in owners), owners[0])
        if owner not in _ASKS_OR_ONLY_READS:
            return [f"{owner} --help"]
        return [shlex.join([owner, *typed.only({option, *_GLOBAL})])]

    def _with_script(self, verb: str, typed: _Typed) -> list[str]:
        """Return the commands for a script and its arguments: before `train` the `up` with what is of the
        cluster; an option of other verbs comes first, as nothing starts by mistake then.
        """
        takes = self.takes[verb]
        strange = [name for name, _ in typed.ours if name and name not in takes]
        owners = {one: [verb for verb in self.takes if one in self.takes[verb]] for one in strange}
        for one in strange:
            if "up" not in owners[one]:
                owner = next((verb for verb in _ASKS_OR_ONLY_READS if verb in owners[one]), "")
                words = typed.only({one, *_GLOBAL} & {*self.takes.get(owner, ())})
                return [shlex.join([owner, *words]) if owner else f"{owners[one][0]} --help"]
        is_own = verb == self.verb
        own = typed.only({"", *takes} - {*(() if is_own and not strange else _YES)})
        job = shlex.join([verb, *own, *(["--", *typed.theirs] if typed.theirs else [])])
        return [f"{shlex.join(['up', *typed.only({*strange, *_GLOBAL})])} && {job}"] if strange else [job]

    def _filled(self, text: str, args: list[str]) -> list[str]:
        """Return the commands of the table's `text` with what was typed: the options that its verb has, the
        job in place of JOB, the first amount in place of {its default}, SCRIPT with all that belongs to it.
        """
        if text.startswith("$ "):
            return [text]
        command, hash, comment = text.partition("   #")
        verb, *more = command.split()
        if verb.startswith("-"):
            return [text]
        typed = self.parted(verb, args)
        if "SCRIPT" in more:
            added = [(word, [word]) for word in more if word != "SCRIPT"]
            return self._with_script(verb, replace(typed, ours=[*added, *typed.ours]))
        amount = next(filter(_AMOUNT.fullmatch, args), "")
        if "{" in command:
            unit = "m" if amount.isdigit() and command.endswith("m}") else ""
            command = re.sub(r"\{(.*)\}", lambda match: amount + unit if amount else match[1], command)
        names = [name for name in self.takes[verb] if name not in (*_YES, *more)]
        if any(name in more for name, _ in typed.ours):  # it was typed as awsddp has it
            command, names = verb, [*names, *more]
        words = [*typed.words, *(one for one in typed.theirs if not one.startswith("-"))]
        if "-c JOB" in command:
            words = [one for one in words if _CLUSTER.fullmatch(one)]
        job = next(iter(words), "last" * ("--resume" in command))
        if "JOB" in command:
            command = command.replace("JOB", shlex.quote(job)) if job else re.sub(r"( -c)? JOB", "", command)
        is_file = verb == "up" and bool(typed.words) and typed.words[0].endswith(_FILES)
        options = [one for one in typed.ours if one[0] in names and not _is_format(one)]
        own = _Typed(options).only(names)
        if verb == "plan":
            keys = {f"--{dashed(key.partition('.')[2])}": key for key in _OF_A_PLAN}
            for key, value in ((keys[name], one[-1]) for name, one in typed.ours if name in keys):
                own += ["-o", f"{key}={value.rpartition('=')[2]}"]
        line = " ".join(filter(None, (command, shlex.join(own))))
        if verb == "up":
            of_job = {name for name in self.takes["train"] if name not in self.takes["up"]}
            train = typed.only({*_GLOBAL, *of_job, *("",) * is_file})
            train += ["--", *typed.theirs] if is_file and typed.theirs else []
            if is_file:
                return [f"{line} && {shlex.join(['train', *train])}"]
            if typed.only(of_job):
                return [f"{line}   # then:", shlex.join(["train", *train])]
        return [f"{line}{hash}{comment}"]

    def _launcher_at(self, args: list[str]) -> int | None:
        """Return where the command line of a launcher begins among the words of `train` and `run`."""
        takes, left = self.takes.get(self.verb, {}), 0
        for at, word in enumerate(args):
            if left:
                left -= 1
            elif _name(word) in takes:
                left = int(bool(takes[_name(word)]) and "=" not in word)
            elif word != "--":
                return at if starts_ranks(args[at:]) or _begins_with_file(args, at) else None
        return None

    def _launched(self, text: str, args: list[str]) -> tuple[str, list[str]]:
        """Return why, and the commands that start what a launcher's command line starts."""
        at = 0 if starts_ranks([self.verb]) else self._launcher_at(args) or 0
        words = [self.verb, *args] if starts_ranks([self.verb]) else args[at:]
        before = [] if words[0] == self.verb else [word for word in args[:at] if word != "--"]
        verb, *more = text.split()
        head, script, after = _parts(words, self.table["launchers"]["modules"].split())
        options, left_out = self._options_of(head)
        is_theirs = "--" in args[:at] or "--" in words[:-1]
        own = self.parted(verb, before).ours
        tail = (
            _Typed([], [one for one in after if one != "--"])
            if is_theirs
            else self.parted(verb, ["x", *after])
        )
        ours = [one for one in tail.ours if one[0]]
        added = [(word, [word]) for word in more if word != "SCRIPT"]
        named = [("", script)] if script else [("", ["SCRIPT"])]
        typed = _Typed([*added, *own, *options, *ours, *named], tail.theirs)
        why = "awsddp starts the ranks itself"
        if left_out:
            why += f", without {', '.join(left_out)}"
        return why, self._with_script(verb, typed)

    def _options_of(self, head: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
        """Return the options of `train` for the words of launchers before the script, and what has none."""
        table = {
            word: text for text, words in self.table["launchers"]["options"].items() for word in words.split()
        }
        found: dict[str, list[str]] = {}
        left_out: list[str] = []
        for at, word in enumerate(head):
            name, value = _name(word), word.partition("=")[2] or "".join(head[at + 1 : at + 2])
            text = table.get(name, "")
            if _ASSIGNMENT.fullmatch(word):
                found[word] = ["--env-var", word]
            elif text == "--timeout" and (time := _minutes(value)):
                found[text] = [text, time]
            elif text and (":" in value if text == "--nnodes" else value.isdigit()):
                found[text] = [text, value]
            elif Path(word).name in ("accelerate", "deepspeed"):
                found["-o"] = ["-o", "job.launcher=torchrun"]
            elif word.startswith("-") and word not in ("-u", "-m", "--module", "--"):
                left_out.append(word)
        return [(words[0], words) for words in found.values()], left_out


def _is_format(option: tuple[str, list[str]]) -> bool:
    """Return whether it is the -o of another tool: -o yaml."""
    name, words = option
    return name == "-o" and "=" not in words[-1]


def _begins_with_file(args: list[str], at: int) -> bool:
    return "--" in args[:at] and args[at].endswith(_FILES)


def _parts(words: list[str], modules: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words of launchers, the script or `-m MODULE`, and what follows it."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and words[at + 1 : at + 2] and words[at + 1] not in modules:
            return words[:at], ["-m", words[at + 1]], words[at + 2 :]
        if word.endswith(_FILES):
            return words[:at], [word], words[at + 1 :]
    return words, [], []


def _minutes(text: str) -> str:
    """Return a time of Slurm as a duration: 90, 1:30:00, 2-12:00; "" for what is none."""
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        return ""
    days, first, second = (int(one or 0) for one in match.groups()[:3])
    has_hours = match[1] or match[4]  # else minutes, or minutes:seconds
    minutes = days * 1440 + first * 60 + second if has_hours else first
    return f"{max(1, minutes)}m"
