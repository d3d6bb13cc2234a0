"""Where bytes are: layouts, who moves which blocks, and address arrays. Pure numpy.

Knows nothing of messages, vLLM or transports. Start at layout.py, then mapping.py, then descriptors.py.
"""
