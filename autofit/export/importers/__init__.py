"""Files of other tools, read as configs: one file here for each tool."""

from autofit.core.errors import InputError
from autofit.export.importers import axolotl, llamafactory, trl
from autofit.export.importers.importer import Importer, Keys

# The first one that knows a file as its own: TRL's keys are in LLaMA-Factory's files, too.
IMPORTERS = (axolotl.IMPORTER, llamafactory.IMPORTER, trl.IMPORTER)


def importer_of(keys: Keys, name: str) -> Importer:
    """The importer of a file, by its keys; `name` is what errors call it.

    Raises:
        InputError: it is of none, or of two.
    """
    found = [each for each in IMPORTERS if each.is_of(keys)]
    titles = ", ".join(each.tool.title for each in IMPORTERS)
    if not found:
        marks = ", ".join(each.marks[0] for each in IMPORTERS)
        message = f"{name} is no file of {titles}: it has none of {marks}."
        raise InputError(message, "Give the YAML file that the tool trains by.")
    if axolotl.IMPORTER in found and len(found) > 1:
        message = f"{name} has keys of {' and of '.join(each.tool.title for each in found[:2])}."
        raise InputError(message, "Leave the keys of one of them.")
    return found[0]
