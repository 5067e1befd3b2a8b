"""The command line. No other package uses click, prints or exits."""
