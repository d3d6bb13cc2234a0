"""kvbaton: hand a request's KV cache from a prefill engine to a decode engine.

Start reading at ARCHITECTURE.md; docs/one-request.md follows one request through the files.
"""

__version__ = "0.1.0"
