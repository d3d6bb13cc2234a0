"""Moves descriptor arrays and opaque notification bytes. Nothing else: no request, no message, no clock.

base.py is the seam; nixl.py the real thing; loopback.py a scripted one in memory. One thread owns a transport.
"""
