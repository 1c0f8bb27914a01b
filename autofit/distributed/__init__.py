"""Several processes that train one model: their Layout as device meshes and groups, and what they
agree on."""

from autofit.distributed.ranks import Ranks

__all__ = ["Ranks"]
