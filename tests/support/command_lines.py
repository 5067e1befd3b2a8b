"""Parses command lines as awsddp does, without running them."""

import re
import shlex

import click

from awsddp.cli.command_line import Globals
from awsddp.cli.main import cli
from awsddp.settings.loader import load

VALUES = {"N": "2", "I": "1", "USD": "5", "TIME": "1h", "MIN:MAX": "1:2", "GB": "300"}
"""A valid value for each placeholder."""


def parse(line: str) -> click.Context:
    """Parse a line as the command does, without running it, and check its -o. Raises click.UsageError."""
    text = line.replace("\\|", "|").partition("   #")[0]
    words = shlex.split(re.sub(r" >>? *\S+$", "", text), comments=True)
    words = [VALUES.get(word, word) for word in words[words.index("awsddp") + 1 :] if word != "..."]
    if {"--help", "--version", "help"} & {*words}:
        return click.Context(cli)
    context = cli.make_context("awsddp", words)
    while isinstance(context.command, click.Group) and (context._protected_args or context.args):
        name, command, arguments = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, arguments, parent=context)
    assignments = context.ensure_object(Globals).override
    load(overrides=dict(text.removeprefix("=").split("=", 1) for text in assignments), environ={})
    return context
