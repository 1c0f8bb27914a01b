"""diffusion: to tell the noise, or the velocity, in noisy latents of a picture or a video."""

from autofit.core.task import Task

DIFFUSION = Task(
    name="diffusion",
    medium="latents",
    labels="noise",
)
