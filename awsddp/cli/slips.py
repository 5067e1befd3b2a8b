"""What a wrong command line meant: by the habits of other tools first (slips.toml), by edit distance last.

Imported only where a command line is wrong.
"""

import difflib
import shlex
import tomllib
from collections.abc import Sequence
from typing import Any

import click

from awsddp.advice import TAKES
from awsddp.cli.options import dashed
from awsddp.errors import UsageError
from awsddp.resources import template
from awsddp.spec import KEYS

WORDS = "awsddp.words"
"""Where a context keeps the words from the verb on."""


def meant(error: click.UsageError, typed: Sequence[str]) -> UsageError:
    """Return the error that says what is wrong with the words `typed`, and what to type."""
    ctx = error.ctx or click.Context(click.Command("awsddp"))
    verb, *args = ctx.meta.get(WORDS, ("",))
    message, command = error.format_message(), ""
    if isinstance(error, click.NoSuchOption):
        at = [*map(_name, args), error.option_name].index(error.option_name)
        shown = [*args, error.option_name][at].partition("=")[0]
        message = f"{shown} is not an option of {ctx.command_path}"
        command = _of_option(ctx, verb, args, at, error.option_name) if verb else ""
    elif type(error) is click.UsageError:
        command = _of_words(ctx, verb, args)
    line = f"{shlex.join(['awsddp', *typed[: len(typed) - len(args) - 1]])} {command}"
    if not command or "\n" in line:  # which nobody types
        return UsageError(message, "", f"{ctx.command_path} --help")
    is_moved = " -- " in command and "--" not in args
    return UsageError(message, "arguments of your script go after --" * is_moved, line)


def _name(word: str) -> str:
    return dashed(word.partition("=")[0])


def _of_words(ctx: click.Context, verb: str, args: list[str]) -> str:
    """Return the command for a verb of another tool, or for an argument that a verb of ours does not take."""
    table = tomllib.loads(template("slips.toml"))["commands"]
    commands = {word: text for text, words in table.items() for word in words.split()}
    for word in ("/".join([verb, *args[:1]]), verb):
        if word in commands:
            return _filled(ctx, commands[word], args)
    if verb.endswith((".py", ".sh")):
        return _filled(ctx, "train SCRIPT", [verb, *args])
    near = [one for one in difflib.get_close_matches(verb, TAKES, n=1, cutoff=0.8) if one != verb]
    return shlex.join([*near, *args]) if near else ""


def _filled(ctx: click.Context, text: str, args: list[str]) -> str:
    """Return a command with what was typed in place of JOB, or of SCRIPT and all that belongs to it."""
    if text.endswith("SCRIPT"):
        return text.replace("SCRIPT", shlex.join(_for_script(ctx.find_root(), text.split()[0], args)))
    job = next((word for word in args if not word.startswith("-")), "last" * ("--resume" in text))
    return text.replace("JOB", shlex.quote(job)) if job else text.replace(" JOB", "")


def _of_option(ctx: click.Context, verb: str, args: list[str], at: int, option: str) -> str:
    """Return the command that was meant with `option`; it is `args[at]`, unless one of several (-it)."""
    rest = list(args)
    _, equals, value = rest.pop(at).partition("=") if at < len(args) else ("", "", "")
    if not equals and rest[at : at + 1] and not rest[at].startswith("-"):
        value = rest.pop(at)
    table, takes = tomllib.loads(template("slips.toml"))["options"], _takes_value(ctx.command)
    known = [text for text, words in table.items() if {verb, option} <= {*words.split()}]
    known += difflib.get_close_matches(option, takes, n=1, cutoff=0.82)  # not --model
    keys = {dashed(f"--{key.partition('.')[2]}"): key for key in KEYS if key.startswith(TAKES.get(verb, ()))}
    known += [f"-o {keys[one]}=" for one in (option, f"{option}-usd") if one in keys]
    if not known:
        return _filled(ctx, f"{verb} SCRIPT", args) if verb in ("train", "run") else ""
    text = known[0]
    if text[:1] not in ("", "-"):
        return _filled(ctx, text, [*filter(None, (value,)), *rest])
    if text.endswith("="):
        text, value = text[:2], f"{text[3:]}{value or 'VALUE'}"
    rest[at:at] = [] if text == "-" else filter(None, (text, value or takes.get(text, "")))
    return shlex.join([verb, *rest])


def _takes_value(command: click.Command) -> dict[str, str]:
    """Return the options of a command, each with what stands for its value, "" where it has none."""
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {
        name: "" if one.is_flag or one.count else (one.metavar or "VALUE").partition("|")[0]
        for one in options
        for name in one.opts
    }


def _for_script(root: Any, verb: str, args: list[str]) -> list[str]:
    """Return the arguments of `train` or `run` with those of the script behind --, ours before it."""
    takes = _takes_value(root.command.get_command(root, verb))
    own: list[str] = []
    rest: list[str] = []
    words, has_script = iter(args), False
    for word in words:
        name = _name(word) if _name(word) in takes else word[:2]
        is_value = bool(rest) and rest[-1].startswith("-") and "=" not in rest[-1]
        if word == "--":
            rest += words
        elif name in takes:
            own += [word, next(words, "")] if takes[name] and dashed(word) == name else [word]
        elif word.startswith("-") or has_script or (is_value and not word.endswith((".py", ".sh"))):
            rest.append(word)
        else:
            own.append(word)
            has_script = True
    return [*own, "--", *rest] if rest else own
