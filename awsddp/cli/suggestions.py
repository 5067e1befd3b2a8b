"""Suggest the right command for a wrong command line.

Other tools' verbs and options (slips.toml) are tried first, and the most similar words last. A suggested
command never launches anything without a question, because -y is not passed to another verb. An option that
limits time or cost is kept. This module is imported only for a wrong command line.
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

from awsddp.cli.options import with_dashes
from awsddp.errors import UsageError
from awsddp.settings.spec import KEYS
from awsddp.settings.values import VARIABLE_NAME
from awsddp.settings.verbs import HEEDS
from awsddp.util.shipped_files import template

WORDS_KEY = "awsddp.words"
"""The key in a context's `meta` that holds the verb and the words after it."""
_CLUSTER_OPTIONS = ("-c", "--cluster", "--region", "--profile")
"""Options that select a cluster; each suggested command has them before its verb."""
_REPEATED_OPTIONS = ("--local", "-o")
"""Other options that are repeated in each command if several commands are suggested."""
_YES = ("-y", "--yes")
_LIMITS = ("--budget", "--idle", "--expires", "--timeout")
"""Options that limit time or cost. They are never passed to a script, even if they are misspelled."""
_PLAN_JOB_KEYS = ("job.world_size", "job.nproc_per_node")
"""Job keys that affect a plan, because they determine how many GPUs a node needs."""
_READ_ONLY = ("status", "jobs", "logs", "why")
_HARMLESS = ("up", "plan", *_READ_ONLY, "exec", "ssh", "doctor")
"""Verbs that are read-only, or that ask before they change anything that costs money."""
_SCRIPT_SUFFIXES = (".py", ".sh")
_CLUSTER = re.compile(r"[a-z][a-z0-9-]{0,30}")
_AMOUNT = re.compile(r"\d+[smhd]?")
_ASSIGNMENT = re.compile(VARIABLE_NAME.pattern + "=.*", re.ASCII | re.DOTALL)
_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class _Words:
    """The words after a verb, divided into awsddp's words and the script's arguments.

    `items` holds awsddp's words. Each item is a pair: an option's name and the option's words, or "" and a
    script or job name.
    """

    items: list[tuple[str, list[str]]]
    script_args: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """The arguments that are not options: a script, or job names."""
        return self.of([""])

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the options in `names` with their values, as words. The name "" selects `arguments`."""
        selected = {*names}
        return [word for name, words in self.items if name in selected for word in words]


def suggest(error: click.UsageError, typed: Sequence[str]) -> UsageError:
    """Return the error for the wrong command line `typed`; its next step is the suggested commands."""
    ctx = error.ctx or click.Context(click.Command("awsddp"))
    verb, *args = ctx.meta.get(WORDS_KEY, ("",))
    before = [*typed[: len(typed) - len(args) - 1]]
    if verb == "sky" and args:  # the table has the verbs of `sky` without `sky`
        verb, *args = args
    cluster_options, args = _split_cluster_options(args)
    before += cluster_options
    correction = _Correction(ctx.find_root(), verb)
    message, why, commands = error.format_message(), "", [""]
    if isinstance(error, click.NoSuchOption):
        index = [*map(_option_name, args), error.option_name].index(error.option_name)
        option = [*args, error.option_name][index].partition("=")[0]
        message = f"{option} is not an option of {ctx.command_path}"
        if verb:
            why, commands = correction.for_option(args, index, error.option_name)
    elif type(error) is click.UsageError:
        why, commands = correction.for_words(args)
    if not any(commands) or "\n" in "".join([*before, *commands]):  # a command with a newline cannot be typed
        return UsageError(message, why, f"{ctx.command_path} --help")
    if any(" -- " in command for command in commands) and "--" not in args:
        why = "; ".join(filter(None, (why, "arguments of your script go after --")))
    is_same = len(commands) == 1 and commands[0].split(maxsplit=1)[:1] == [verb] and " && " not in commands[0]
    before = before if is_same else [word for word in before if word not in _YES]
    return UsageError(message, why, "\n".join(_command_line(before, command) for command in commands))


def is_launcher_command(words: Sequence[str]) -> bool:
    """Return True if words are a launcher's command line: torchrun, python, mpirun.

    Shell variable assignments may come first. A script after such assignments also counts as a launcher.
    """
    start = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    if start == len(words):
        return False
    names = _read_table()["launchers"]["names"].split()
    return Path(words[start]).name in names or (start > 0 and words[start].endswith(_SCRIPT_SUFFIXES))


def _split_cluster_options(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the options that select a cluster, and the other words."""
    end = args.index("--") if "--" in args else len(args)
    for index, word in enumerate(args[: end - 1]):
        if word in _CLUSTER_OPTIONS:
            more, others = _split_cluster_options([*args[:index], *args[index + 2 :]])
            return [*args[index : index + 2], *more], others
    return [], args


def _read_table() -> dict[str, Any]:
    return tomllib.loads(template("slips.toml"))


def _option_name(word: str) -> str:
    return with_dashes(word.partition("=")[0])


def _command_line(before: list[str], text: str) -> str:
    """Return `text` as a command line in which each command begins with "awsddp" and the words `before`."""
    if text.startswith("$ "):
        return text.removeprefix("$ ")
    commands, mark, comment = text.partition("   #")
    prefix = shlex.join(["awsddp", *before])
    return " && ".join(f"{prefix} {command}" for command in commands.split(" && ")) + mark + comment


def _value_names(command: click.Command) -> dict[str, str]:
    """Return a dict that maps each of a command's options to the name of its value ("" for a flag)."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {
        name: "" if option.is_flag or option.count else (option.metavar or "VALUE").partition("|")[0]
        for option in options
        for name in option.opts
    }


class _Correction:
    """Corrections for a wrong command line; `verb` may be another tool's verb.

    `options` maps each awsddp verb to its options, each with the name of its value.
    """

    def __init__(self, ctx: click.Context, verb: str) -> None:
        root: Any = ctx.command
        commands = {name: root.get_command(ctx, name) for name in (*HEEDS, "init")} if verb else {}
        self.verb = verb
        self.options = {name: _value_names(command) for name, command in commands.items()}
        self.table = _read_table()

    def split(self, verb: str, words: Sequence[str]) -> _Words:
        """Divide a command line's words into awsddp's words and the script's arguments.

        The script's arguments are options that no verb has, and other words after the script. Of the short
        options, only those of `verb` are recognised.
        """
        options = {
            name: value for names in self.options.values() for name, value in names.items() if name[1] == "-"
        }
        options |= self.options.get(verb, {})
        items: list[tuple[str, list[str]]] = []
        script_args: list[str] = []
        remaining, has_script = iter(words), False
        for word in remaining:
            name = _option_name(word) if _option_name(word) in options else word[:2]
            is_value = bool(script_args) and script_args[-1].startswith("-") and "=" not in script_args[-1]
            if word == "--":
                script_args += remaining
            elif name in options:
                needs_value = options[name] and with_dashes(word) == name
                value = [next(remaining, options[name])] if needs_value else []
                items.append((name, [word, *value]))
            elif word.startswith("-") or has_script or (is_value and not word.endswith(_SCRIPT_SUFFIXES)):
                script_args.append(word)
            else:
                items.append(("", [word]))
                has_script = True
        return _Words(items, script_args)

    def for_words(self, args: list[str]) -> tuple[str, list[str]]:
        """Return (why, commands) for another tool's verb, or for arguments that a verb does not take."""
        verb = self.verb
        commands = {word: text for text, words in self.table["commands"].items() for word in words.split()}
        if (is_launcher_command([verb]) and args) or self._launcher_start(args) is not None:
            return self._for_launcher(commands.get(verb, f"{verb} SCRIPT"), args)
        for word in ("/".join([verb, *args[:1]]), verb):
            if word in commands:
                is_file = verb in ("plan", "up") and any(arg.endswith(_SCRIPT_SUFFIXES) for arg in args)
                why = "only awsddp train and awsddp run take a script" if is_file else ""
                return why, self._fill(commands[word], args)
        if verb.endswith(_SCRIPT_SUFFIXES):
            return "", self._fill("train SCRIPT", [verb, *args])
        near = [name for name in difflib.get_close_matches(verb, HEEDS, n=1, cutoff=0.8) if name != verb]
        return "", [shlex.join([*near, *args]) if near else ""]

    def for_option(self, args: list[str], index: int, option: str) -> tuple[str, list[str]]:
        """Return (why, commands) for a wrong option: `args[index]`, or a letter in combined options (-it)."""
        verb, options = self.verb, self.options.get(self.verb, {})
        if self._launcher_start(args) is not None:
            return self._for_launcher(f"{verb} SCRIPT", args)
        others = list(args)
        _, equals, value = others.pop(index).partition("=") if index < len(args) else ("", "", "")
        if not equals and others[index : index + 1] and not others[index].startswith("-"):
            value = others.pop(index)
        owners = [name for name, names in self.options.items() if option in names and option.startswith("--")]
        texts = [text for text, words in self.table["options"].items() if {verb, option} <= {*words.split()}]
        if option == "--gpus" and verb == "train" and value.isdigit():
            texts = ["--nproc-per-node"]
        if not texts and not owners:
            texts = difflib.get_close_matches(option, options, n=1, cutoff=0.82)  # not --model
            if not texts and (limits := difflib.get_close_matches(option, _LIMITS, n=1, cutoff=0.82)):
                return self.for_option(self._replace_option(args, index, limits[0]), index, limits[0])
        prefixes = (*HEEDS.get(verb, ()), *_PLAN_JOB_KEYS * (verb == "plan"))
        keys = {with_dashes(f"--{key.partition('.')[2]}"): key for key in KEYS if key.startswith(prefixes)}
        texts += [f"-o {keys[name]}=" for name in (option, f"{option}-usd") if name in keys and options]
        why = f"it is an option of awsddp {', '.join(owners)}" if owners else ""
        if not texts:
            if verb in ("train", "run"):
                return why, self._with_script(verb, self.split(verb, args))
            return why, self._for_owners(owners, args, option, value) if owners else [""]
        text = texts[0]
        if text[:1] not in ("", "-"):
            return "", self._fill(text, [*filter(None, (value,)), *others])
        if text.endswith("="):
            text, value = text[:2], f"{text[3:]}{value or 'VALUE'}"
        text, _, fixed_value = text.partition(" ")
        value = fixed_value or value
        others[index:index] = [] if text == "-" else filter(None, (text, value or options.get(text, "")))
        if verb in ("train", "run"):  # `_with_script` also checks the other words
            return why, self._with_script(verb, self.split(verb, others))
        return why, [shlex.join([verb, *others])]

    @staticmethod
    def _replace_option(args: list[str], index: int, option: str) -> list[str]:
        _, equals, value = args[index].partition("=")
        return [*args[:index], option + equals + value, *args[index + 1 :]]

    def _for_owners(self, owners: list[str], args: list[str], option: str, value: str) -> list[str]:
        """Return the commands for an option that this verb does not have, but the verbs in `owners` have."""
        words = self.split(self.verb, args)
        if self.verb in ("up", "plan") and "train" in owners:
            verb_words = words.of(self.options[self.verb].keys() - {*_YES})
            expiry = ["--expires", value] if option == "--timeout" and value else []
            train = ["train", *words.of({*self.options["train"]} - {*_YES, *self.options[self.verb]})]
            return [f"{shlex.join([self.verb, *verb_words, *expiry])}   # then:", shlex.join(train)]
        if "up" in owners:  # an option of `up` after another verb must not suggest a launch
            if self.verb not in _READ_ONLY:
                return [f"{self.verb} --help"]
            return [shlex.join([self.verb, *words.of({"", *self.options[self.verb]})])]
        owner = next((verb for verb in _HARMLESS if verb in owners), owners[0])
        if owner not in _HARMLESS:
            return [f"{owner} --help"]
        return [shlex.join([owner, *words.of({option, *_REPEATED_OPTIONS})])]

    def _with_script(self, verb: str, words: _Words) -> list[str]:
        """Return the commands that run a script with its arguments.

        The command is `verb`, preceded by `up` if options for `up` were typed. If an option for any other
        verb was typed, only that verb's command is returned, so that nothing starts by mistake.
        """
        options = self.options[verb]
        foreign = [name for name, _ in words.items if name and name not in options]
        for name in foreign:
            owners = [verb for verb in self.options if name in self.options[verb]]
            if "up" not in owners:
                owner = next((verb for verb in _HARMLESS if verb in owners), "")
                owner_words = words.of({name, *_REPEATED_OPTIONS} & {*self.options.get(owner, ())})
                return [shlex.join([owner, *owner_words]) if owner else f"{owners[0]} --help"]
        keeps_yes = verb == self.verb and not foreign
        verb_words = words.of({"", *options} - {*(() if keeps_yes else _YES)})
        separator = ["--"] if words.script_args else []
        command = shlex.join([verb, *verb_words, *separator, *words.script_args])
        if foreign:
            return [f"{shlex.join(['up', *words.of({*foreign, *_REPEATED_OPTIONS})])} && {command}"]
        return [command]

    def _fill(self, text: str, args: list[str]) -> list[str]:
        """Return the commands in one of the table's texts, with the words that the user typed filled in.

        JOB is replaced with the job, {60m} with the first amount that was typed, and SCRIPT with the script
        and its arguments. The typed options that the text's verb accepts are appended.
        """
        if text.startswith("$ "):
            return [text]
        command, mark, comment = text.partition("   #")
        verb, *more = command.split()
        if verb.startswith("-"):
            return [text]
        words = self.split(verb, args)
        if "SCRIPT" in more:
            added = [(word, [word]) for word in more if word != "SCRIPT"]
            return self._with_script(verb, replace(words, items=[*added, *words.items]))
        if "{" in command:
            command = self._fill_amount(command, args)
        names = [name for name in self.options[verb] if name not in (*_YES, *more)]
        if any(name in more for name, _ in words.items):  # the option was typed in awsddp's form
            command, names = verb, [*names, *more]
        if "JOB" in command:
            command = self._fill_job(command, words)
        is_file = verb == "up" and bool(words.arguments) and words.arguments[0].endswith(_SCRIPT_SUFFIXES)
        verb_words = _Words([item for item in words.items if not _is_output_format(item)]).of(names)
        if verb == "plan":
            keys = {f"--{with_dashes(key.partition('.')[2])}": key for key in _PLAN_JOB_KEYS}
            for key, value in ((keys[name], item[-1]) for name, item in words.items if name in keys):
                verb_words += ["-o", f"{key}={value.rpartition('=')[2]}"]
        line = " ".join(filter(None, (command, shlex.join(verb_words))))
        if verb == "up":
            job_options = {name for name in self.options["train"] if name not in self.options["up"]}
            train = words.of({*_REPEATED_OPTIONS, *job_options, *("",) * is_file})
            train += ["--", *words.script_args] if is_file and words.script_args else []
            if is_file:
                return [f"{line} && {shlex.join(['train', *train])}"]
            if words.of(job_options):
                return [f"{line}   # then:", shlex.join(["train", *train])]
        return [f"{line}{mark}{comment}"]

    @staticmethod
    def _fill_amount(command: str, args: list[str]) -> str:
        """Return a command with {60m} replaced by the first amount in `args`, or by the default 60m."""
        amount = next(filter(_AMOUNT.fullmatch, args), "")
        unit = "m" if amount.isdigit() and command.endswith("m}") else ""
        return re.sub(r"\{(.*)\}", lambda match: amount + unit if amount else match[1], command)

    @staticmethod
    def _fill_job(command: str, words: _Words) -> str:
        """Return a command in which the first fitting argument replaces JOB; if none fits, JOB is removed."""
        names = [*words.arguments, *(word for word in words.script_args if not word.startswith("-"))]
        if "-c JOB" in command:
            names = [name for name in names if _CLUSTER.fullmatch(name)]
        name = next(iter(names), "last" * ("--resume" in command))
        return command.replace("JOB", shlex.quote(name)) if name else re.sub(r"( -c)? JOB", "", command)

    def _launcher_start(self, args: list[str]) -> int | None:
        """Return the index in `train` or `run` arguments where a launcher's command line begins, or None."""
        if self.verb not in ("train", "run"):
            return None
        options, skip = self.options[self.verb], False
        for index, word in enumerate(args):
            if skip:
                skip = False
            elif _option_name(word) in options:
                skip = bool(options[_option_name(word)]) and "=" not in word
            elif word != "--":
                is_script = "--" in args[:index] and word.endswith(_SCRIPT_SUFFIXES)
                return index if is_script or is_launcher_command(args[index:]) else None
        return None

    def _for_launcher(self, text: str, args: list[str]) -> tuple[str, list[str]]:
        """Return (why, commands) for a launcher's command line; the commands start the same ranks."""
        is_verb = is_launcher_command([self.verb])
        start = 0 if is_verb else self._launcher_start(args) or 0
        words = [self.verb, *args] if is_verb else args[start:]
        before = [] if is_verb else [word for word in args[:start] if word != "--"]
        verb, *more = text.split()
        head, script, tail = _split_at_script(words, self.table["launchers"]["modules"].split())
        options, omitted = self._convert_options(head)
        if "--" in args[:start] or "--" in words[:-1]:
            tail_words = _Words([], [word for word in tail if word != "--"])
        else:
            tail_words = self.split(verb, ["x", *tail])
        added = [(word, [word]) for word in more if word != "SCRIPT"]
        before_items = self.split(verb, before).items
        tail_items = [item for item in tail_words.items if item[0]]
        items = [*added, *before_items, *options, *tail_items, ("", script or ["SCRIPT"])]
        why = "awsddp starts the ranks itself"
        if omitted:
            why += f", without {', '.join(omitted)}"
        return why, self._with_script(verb, _Words(items, tail_words.script_args))

    def _convert_options(self, head: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
        """Return a launcher's options as `train` options, and those options that have no equivalent."""
        table = {
            word: text for text, words in self.table["launchers"]["options"].items() for word in words.split()
        }
        options: dict[str, list[str]] = {}
        omitted: list[str] = []
        for index, word in enumerate(head):
            value = word.partition("=")[2] or "".join(head[index + 1 : index + 2])
            option = table.get(_option_name(word), "")
            if _ASSIGNMENT.fullmatch(word):
                options[word] = ["--env-var", word]
            elif option == "--timeout" and (time := _slurm_duration(value)):
                options[option] = [option, time]
            elif option and (":" in value if option == "--nnodes" else value.isdigit()):
                options[option] = [option, value]
            elif Path(word).name in ("accelerate", "deepspeed"):
                options["-o"] = ["-o", "job.launcher=torchrun"]
            elif word.startswith("-") and word not in ("-u", "-m", "--module", "--"):
                omitted.append(word)
        return [(words[0], words) for words in options.values()], omitted


def _is_output_format(option: tuple[str, list[str]]) -> bool:
    """Return True if the option is another tool's -o, such as -o yaml."""
    name, words = option
    return name == "-o" and "=" not in words[-1]


def _split_at_script(words: list[str], modules: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words before the script, the script itself (or `-m MODULE`), and the words after it."""
    for index, word in enumerate(words):
        following = words[index + 1 : index + 2]
        if word in ("-m", "--module") and following and following[0] not in modules:
            return words[:index], ["-m", following[0]], words[index + 2 :]
        if word.endswith(_SCRIPT_SUFFIXES):
            return words[:index], [word], words[index + 1 :]
    return words, [], []


def _slurm_duration(text: str) -> str:
    """Convert a Slurm time (90, 1:30:00, 2-12:00) to minutes ("90m"); return "" for other texts."""
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        return ""
    days, first, second = (int(number or 0) for number in match.groups()[:3])
    has_hours = match[1] or match[4]  # otherwise the text is minutes, or minutes:seconds
    minutes = days * 1440 + first * 60 + second if has_hours else first
    return f"{max(1, minutes)}m"
