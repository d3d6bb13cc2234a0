"""What is said between two engines, and what it means. Pure: no clock (time comes in as `now_s`), thread or socket.

messages.py is the wire, params.py the ticket that rides on HTTP, rendezvous.py one transfer's life at one end,
segments.py what its poster has to send next, receipt.py the count of what has arrived.
"""
