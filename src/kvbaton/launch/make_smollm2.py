"""Turns the GGUF file of SmolLM2-135M-Instruct into a plain Llama folder. Run by models.py as a process of its own:

    python -m kvbaton.launch.make_smollm2 GGUF_FILE FOLDER

Invariant: the only file of the launcher that loads torch, and never inside the kvbaton process: the launcher stays a
second away from its prompt and imports no accelerator library. One line on stdout per step; all else goes to stderr.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_START_S = time.monotonic()


def main(arguments: list[str]) -> int:
    """The folder holds bf16 weights, tokenizer and chat template that `vllm serve` loads offline."""
    gguf, folder = Path(arguments[0]), Path(arguments[1])
    _say("loading torch and transformers")
    import torch  # noqa: PLC0415 - the line above must appear before these slow imports
    import transformers  # noqa: PLC0415

    _say("reading the GGUF file")
    read = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    settings = read.config.to_dict()
    # The copy below holds plain tensors: with the entry kept, vLLM would look for packed GGUF ones.
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    plain = type(read)(type(read.config).from_dict(settings)).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict(), strict=True)
    plain.generation_config.do_sample = False
    _say("writing weights")
    plain.save_pretrained(folder)
    _say("converting the tokenizer")
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    for file in folder.iterdir():
        # save_pretrained writes weights for the owner only; prepared models are shared.
        file.chmod(0o644)
    return 0


def _say(step: str) -> None:
    sys.stdout.write(f"{step} ({time.monotonic() - _START_S:.0f} s)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
