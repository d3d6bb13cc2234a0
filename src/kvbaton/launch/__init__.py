"""Brings a prefill/decode deployment up on one machine, watches it, and takes it down leaving nothing behind.

`spec` says what is wanted, `plan` turns it into exact command lines, `supervisor` runs them; start reading there.
Imports nothing of the connector stack: an engine is a command line, a URL, a log file and a trace file.
"""
