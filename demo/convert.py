"""Turns one GGUF file into a float32 model folder: ``python -m demo.convert FILE FOLDER``. Driven by ``weights``."""

import os
import sys
from pathlib import Path


def main(source: Path, folder: Path) -> None:
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; transformers' own switch leaves some bars on
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.config.name_or_path = ""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
