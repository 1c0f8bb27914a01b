"""torchtitan's own making of a config. Our check adds what a Literal allows, and adapters that match no layer."""

import dataclasses
import logging
import sys
import typing
from pathlib import Path

from torchtitan.config.manager import ConfigManager


def parse(path):
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    sys.path.insert(0, str(Path(path).parent))
    sys.modules.pop(Path(path).stem, None)
    try:
        config = ConfigManager().parse_args(["--module", Path(path).stem, "--config", "autofit"])
    finally:
        sys.path.pop(0)
        logging.getLogger().removeHandler(handler)
    for section in (config.training, config.parallelism):
        hints = typing.get_type_hints(type(section))
        for each in dataclasses.fields(section):
            if typing.get_origin(hints[each.name]) is typing.Literal:
                value = getattr(section, each.name)
                assert value in typing.get_args(hints[each.name]), (
                    f"our check: no {each.name} {value}"
                )
    unmatched = [text for text in warned if "match" in text.lower() and "lora" in text.lower()]
    assert not unmatched, f"our check: {unmatched}"
