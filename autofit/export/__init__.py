"""What a found config becomes outside of autofit: text for other tools and for people, one file a tool."""

from autofit.export.script import train_script

__all__ = ["train_script"]
