"""Environments of other tools: what each one's own parser needs, and what it must refuse.

Each is made on top of the packages that run the tests, which it sees behind its own, so that torch is never installed.
"""

import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """`packages` come with what they need (`torch` is held as it is), those of `alone` without.

    deepspeed, liger-kernel and the like are what people's files ask for, which benchmarks.corpus_parsers has read.
    """

    alone: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    # What makes a file wrong: its text -> another text.
    wrong: tuple[Callable[[str], str], ...] = ()


def key(yaml: str) -> Callable[[str], str]:
    """Adds a line to a YAML file."""
    return lambda text: f"{text}\n{yaml}\n"


def instead(before: str, after: str) -> Callable[[str], str]:
    """Replaces what the file is sure to hold."""

    def replaced(text: str) -> str:
        assert before in text, before
        return text.replace(before, after, 1)

    return replaced


ENVIRONMENTS = {
    "axolotl": Environment(
        alone=(
            *("axolotl==0.19.0", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6"),
            *("colorama", "fastcore", "fire", "llvmlite", "numba", "posthog", "termcolor"),
            *("liger-kernel==0.8.5", "triton"),
        ),
        packages=(
            *(
                "transformers==5.16.1",
                "accelerate==1.13.0",
                "datasets==4.8.4",
                "pydantic==2.12.5",
                "peft==0.20.0",
            ),
            *("trl==1.9.0", "evaluate==0.4.1", "wandb", "addict", "pillow"),
            *("mistral-common==1.13.1", "deepspeed==0.19.8"),
        ),
        wrong=(
            key("micro_batch: 2"),
            instead("optimizer: adamw", "optimizer: adamv"),
            key("load_in_8bit: true\nload_in_4bit: true\nadapter: qlora"),
        ),
    ),
    "deepspeed": Environment(
        packages=("deepspeed==0.19.8",),
        wrong=(
            instead('"gradient_clipping"', '"gradient_clip"'),
            instead('"stage": ', '"stages": '),
            instead('"device": "none"', '"device": "gpu"'),
        ),
    ),
    "llamafactory": Environment(
        # peft 0.18 adapts no model beside the torchao of the tests
        alone=(
            *("llamafactory==0.9.5", "antlr4-python3-runtime==4.9.3", "torchao==0.13.0"),
            "liger-kernel==0.8.5",
        ),
        packages=(
            *(
                "transformers==5.6.0",
                "accelerate==1.11.0",
                "datasets==4.0.0",
                "peft==0.18.1",
                "trl==0.24.0",
            ),
            *("omegaconf", "matplotlib", "deepspeed==0.19.8"),
        ),
        wrong=(
            key("max_seq_length: 512"),
            instead("optim: adamw", "optim: adamv"),
            key("lora_rank: four"),
        ),
    ),
    "msswift": Environment(
        alone=("ms-swift==4.6.0", "liger-kernel==0.8.5"),
        packages=(
            *("transformers==5.16.1", "accelerate==1.13.0", "datasets==4.8.4", "peft==0.20.0"),
            *("trl==0.29.1", "modelscope==1.40.2", "modelscope_hub==0.5.1", "addict", "attrdict"),
            *("binpacking", "dacite", "einops", "fastapi", "json_repair", "matplotlib", "nltk"),
            *("rouge", "simplejson", "tensorboard", "uvicorn", "cryptography", "six", "msgspec"),
            "deepspeed==0.19.8",
        ),
        wrong=(
            key("micro_batch: 2"),
            key("quant_bits: 5"),
            instead("torch_dtype: bfloat16", "torch_dtype: bfloat17"),
        ),
    ),
    "torchtune": Environment(
        alone=("torchao==0.13.0",),
        packages=("torchtune==0.6.1",),
        wrong=(
            key("micro_batch_size: 2"),
            instead(
                "torchtune.models.llama3_1.llama3_1_8b", "torchtune.models.llama3_1.llama3_1_9b"
            ),
            instead("torch.optim.AdamW\n", "torch.optim.AdamW\n  learning_rate: 1\n"),
        ),
    ),
    "litgpt": Environment(
        alone=("litgpt==0.5.13",),
        packages=("lightning==2.6.6", "jsonargparse[signatures]", "requests"),
        wrong=(
            instead("precision: bf16-true", "precision: bf17-true"),
            instead("micro_batch_size", "micro_batch"),
            instead("torch.optim.AdamW", "torch.optim.AdamV"),
        ),
    ),
    "lightning": Environment(
        packages=("lightning==2.6.6", "jsonargparse[signatures]"),
        wrong=(
            instead("accumulate_grad_batches", "accumulate_batches"),
            instead("precision: bf16-true", "precision: bf17-true"),
            instead("devices: 1", "devices: {one: 1}"),
        ),
    ),
    "unsloth": Environment(
        alone=(
            *(
                "unsloth==2026.10.9",
                "unsloth_zoo",
                "requests",
                "urllib3",
                "charset_normalizer",
                "certifi",
                "idna",
            ),
            *("msgspec", "nest_asyncio", "cut_cross_entropy", "tyro"),
        ),
        wrong=(
            instead("load_in_8bit=", "load_8bit="),
            instead("full_finetuning=", "finetuning="),
        ),
    ),
    "ludwig": Environment(
        alone=("--ignore-requires-python", "ludwig==0.17.10"),  # it asks for Python 3.12
        packages=(
            *(
                "jsonschema",
                "dataclasses-json",
                "retry",
                "tabulate",
                "torchmetrics",
                "torchinfo",
                "absl-py",
            ),
            *("xlrd", "openpyxl", "lxml", "requests", "py-cpuinfo"),
        ),
        wrong=(
            instead("enable_gradient_checkpointing", "gradient_checkpointing"),
            instead("type: adamw", "type: adamv"),
            instead("batch_size: 2", "batch_size: two"),
        ),
    ),
    "torchtitan": Environment(
        alone=("triton",),
        packages=("torchtitan==0.3.0",),
        wrong=(
            instead("local_batch_size=", "batch_size="),
            instead('dtype="bfloat16"', 'dtype="bfloat17"'),
            instead("FullAC.Config()", "FullAC.Config(every=2)"),
        ),
    ),
}


def made(environment: Environment, folder: Path) -> Path:
    """The interpreter of a new environment; raises CalledProcessError where something cannot be installed."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "zz_inherited.pth").write_text(sysconfig.get_path("purelib") + "\n")
    held = folder / "held.txt"
    held.write_text("torch==2.13.0\n")
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(held)]
    for names in (
        environment.packages,
        ("--no-deps", *environment.alone) if environment.alone else (),
    ):
        if names:
            subprocess.run([*pip, *names], check=True, timeout=600, env=environment_variables())
    return python


def environment_variables() -> dict[str, str]:
    """Those of the tests, without what would bring in their tree or a network."""

    return {**os.environ, "DS_BUILD_OPS": "0", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
