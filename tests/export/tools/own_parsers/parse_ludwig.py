"""Ludwig's own schema of a config, without the packages for images and sound, which it imports and has no use for here.

Our check adds keys of the sections, of which its schema lets any through.
"""

import importlib.machinery
import sys
from pathlib import Path
from unittest import mock

import transformers  # before what it would take for installed
import yaml


class Absent:
    """Finds any module of those packages, with nothing in it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        absent = name.partition(".")[0] in ("torchvision", "torchaudio", "torchcodec")
        return importlib.machinery.ModuleSpec(name, Absent, is_package=True) if absent else None

    @staticmethod
    def create_module(spec):
        return mock.MagicMock(__spec__=spec, __path__=[], __version__="1.0", __name__=spec.name)

    @staticmethod
    def exec_module(module):
        """There is nothing to run."""


sys.meta_path.append(Absent)

from ludwig.config_validation.validation import check_schema
from ludwig.schema.llms.peft import LoraConfig
from ludwig.schema.llms.quantization import QuantizationConfig
from ludwig.schema.optimizers import optimizer_registry
from ludwig.schema.trainer import FineTuneTrainerConfig

SECTIONS = {
    "trainer": FineTuneTrainerConfig,
    "adapter": LoraConfig,
    "quantization": QuantizationConfig,
}
assert transformers
TOP = {"model_type", "base_model", "input_features", "output_features", "preprocessing", *SECTIONS}


def parse(path):
    given = yaml.safe_load(Path(path).read_text())
    check_schema(given)
    assert set(given) <= TOP, f"our check: Ludwig knows no {sorted(set(given) - TOP)}"
    for section, kind in SECTIONS.items():
        unknown = set(given.get(section, ())) - set(vars(kind())) - {"type"}
        assert not unknown, f"our check: {section} knows no {sorted(unknown)}"
    optimizer = given["trainer"]["optimizer"]["type"]
    assert optimizer in optimizer_registry, f"our check: no optimizer {optimizer}"
    sizes = [given["trainer"][name] for name in ("batch_size", "gradient_accumulation_steps")]
    assert all(isinstance(size, int) for size in sizes), f"our check: {sizes} are no batch sizes"
