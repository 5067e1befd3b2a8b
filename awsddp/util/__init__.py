"""Helpers for all modules: text formats, threads, files in the package, and safe terminal output."""
