"""Files of other tools, read as configs: one file here for each tool."""

from autofit.core.errors import InputError
from autofit.export.importers import axolotl, llamafactory, msswift, transformers, trl
from autofit.export.importers.command_line import COMMAND, CommandLine
from autofit.export.importers.document import Document
from autofit.export.importers.importer import Importer, Keys

# The first one that knows a file as its own: TRL's keys are in LLaMA-Factory's files, too.
IMPORTERS = (
    axolotl.IMPORTER,
    msswift.IMPORTER,
    llamafactory.IMPORTER,
    trl.IMPORTER,
    transformers.IMPORTER,
)
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_PROGRAMS = tuple(program for importer in IMPORTERS for program in importer.programs)


def document_of(text: str, name: str, *, is_command: bool = False) -> Document | CommandLine:
    """A text as the file that it is: a command where its lines hold one, else YAML.

    Args:
        name: what errors call it; that of a script ends in .sh, or its text begins with #!.
        is_command: the text is a command, whatever it is called.

    Raises:
        InputError: it can be read as neither.
    """
    if is_command or name.endswith(_SCRIPTS) or text.startswith("#!"):
        return CommandLine.of(text, name, _PROGRAMS)
    return Document.of(text, name)


def importer_of(keys: Keys, name: str) -> Importer:
    """The importer of a file, by its command or its keys; `name` is what errors call it.

    Raises:
        InputError: it is of none, or of two.
    """
    program = tuple(str(keys.get(COMMAND)).split())
    if program in _PROGRAMS:
        return next(each for each in IMPORTERS if program in each.programs)

    found = [each for each in IMPORTERS if each.is_of(keys)]
    if len(found) > 1:  # many tools take Trainer's arguments
        found = [each for each in found if each is not transformers.IMPORTER]
    titles = ", ".join(each.tool.title for each in IMPORTERS)
    if not found:
        marks = ", ".join(each.marks[0] for each in IMPORTERS)
        message = f"{name} is no file of {titles}: it has none of {marks}."
        raise InputError(message, "Give the YAML file that the tool trains by.")

    if axolotl.IMPORTER in found and len(found) > 1:
        message = f"{name} has keys of {' and of '.join(each.tool.title for each in found[:2])}."
        raise InputError(message, "Leave the keys of one of them.")

    return found[0]
