"""Files of other tools, read as configs: one file here for each tool."""

from autofit.core.errors import InputError
from autofit.export.importers import (
    aitoolkit,
    axolotl,
    llamafactory,
    msswift,
    onetrainer,
    sdscripts,
    transformers,
    trl,
)
from autofit.export.importers.command_line import COMMAND, CommandLine
from autofit.export.importers.document import Document
from autofit.export.importers.importer import Importer, Keys
from autofit.export.importers.toml_document import TomlDocument
from autofit.export.importers.transformers import OF_SCRIPTS

# The first one that knows a file as its own: TRL's keys are in LLaMA-Factory's files, too.
IMPORTERS = (
    sdscripts.IMPORTER,
    aitoolkit.IMPORTER,
    onetrainer.IMPORTER,
    axolotl.IMPORTER,
    msswift.IMPORTER,
    llamafactory.IMPORTER,
    trl.IMPORTER,
    transformers.IMPORTER,
)
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_PROGRAMS = tuple(program for importer in IMPORTERS for program in importer.programs)


def document_of(
    text: str, name: str, *, is_command: bool = False
) -> Document | TomlDocument | CommandLine:
    """A text as the file that it is: a command where its lines hold one, else TOML or YAML.

    Args:
        name: what errors call it; that of a script ends in .sh, or its text begins with #!; that
            of a TOML file ends in .toml.
        is_command: the text is a command, whatever it is called.

    Raises:
        InputError: it can be read as none of them.
    """
    if is_command or name.endswith(_SCRIPTS) or text.startswith("#!"):
        return CommandLine.of(text, name, _PROGRAMS)
    if name.endswith(".toml"):
        return TomlDocument.of(text, name)
    return Document.of(text, name)


def importer_of(keys: Keys, name: str) -> Importer:
    """The importer of a file, by its command or its keys; `name` is what errors call it.

    Raises:
        InputError: it is of none, or of two.
    """
    program = tuple(str(keys.get(COMMAND)).split())
    for importer in IMPORTERS:
        if program in importer.programs:
            return importer

    found = [importer for importer in IMPORTERS if importer.is_of(keys)]
    if found == [trl.IMPORTER, transformers.IMPORTER] and OF_SCRIPTS & keys.keys():
        return transformers.IMPORTER

    if not found:
        titles = ", ".join(importer.tool.title for importer in IMPORTERS)
        marks = ", ".join(importer.marks[0] for importer in IMPORTERS)
        message = f"{name} is no file of {titles}: it has none of {marks}."
        raise InputError(message, "Give the file that the tool trains by.")

    if len(found) > 1 and transformers.IMPORTER in found:
        found.remove(transformers.IMPORTER)  # many tools take Trainer's arguments
    if len(found) > 1 and axolotl.IMPORTER in found:
        first, second = found[:2]
        message = f"{name} has keys of {first.tool.title} and of {second.tool.title}."
        raise InputError(message, "Leave the keys of one of them.")

    return found[0]
