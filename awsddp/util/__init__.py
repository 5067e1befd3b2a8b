"""Helpers for all modules: formats, threads, shipped files, safe terminal output."""
