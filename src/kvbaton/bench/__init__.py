"""Measures and shows: the same workload through different deployments, and one request's way through two engines.

Pure: `workload` (what is sent when), `records` (one request, one report), `metrics` (figures), `timeline` (spans of one
transfer), `text` (tables and bars). Doing: `client` and `load` send requests, `pictures` draws, `demo` and `compare` are
the commands. Imports nothing of the connector stack: engines are command lines, URLs and trace files. Start with `demo`.
"""
