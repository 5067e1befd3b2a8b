"""The command line: parse, ask, call the verb, print. The only room that knows click, prints or exits."""
