"""Diffusion: to tell what was mixed into latents.

By its noise (Ho et al. 2020, arXiv:2006.11239, equation 14), by the velocity between the two (v:
Salimans and Ho 2022, arXiv:2202.00512, appendix D), or by that of a straight way from the noise to
the picture (flow matching: Lipman et al. 2022, arXiv:2210.02747; as in arXiv:2403.03206, section
2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from autofit.core.errors import InputError, is_whole, require, unknown
from autofit.core.tasks.diffusion import DIFFUSION as TASK
from autofit.models.diffusion.denoisers import DENOISERS, TRAIN_STEPS

if TYPE_CHECKING:
    import torch

PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow")
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")


@dataclass(frozen=True)
class Diffusion:
    """(model, batch) -> the mean squared error of the prediction, as diffusers' training scripts
    have it.

    A batch holds `latents` [samples, channels, (frames,) rows, columns], `noise` of the same shape,
    `timesteps` [samples] from 0 to 1000, and what its denoiser is told: `encoder_hidden_states`
    [samples, tokens, width], `pooled_projections`, `time_ids`, `guidance`. Where text encoders are
    trained with it, the tokens of prompts stand in place of what is made of them: `prompt_ids` and
    of SDXL `prompt_ids_2`, [samples, tokens].

    Args:
        denoiser: the class of diffusers that is trained.
        prediction: `epsilon`, the noise; `v_prediction`; `sample`, the latents; `flow`, the noise
            less the latents, where a share of timestep / 1000 is noise.
        beta_start, beta_end, beta_schedule, train_steps: of the variance that is added in each step
            up to a timestep, for other than `flow`.

    Raises:
        InputError: for a value that it does not take.
    """

    denoiser: str = "UNet2DConditionModel"
    prediction: str = "epsilon"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    train_steps: int = TRAIN_STEPS

    task: ClassVar[str] = TASK.name

    def __post_init__(self) -> None:
        if self.denoiser not in DENOISERS:
            raise unknown("denoiser", self.denoiser, DENOISERS)
        rule = f"prediction must be one of {', '.join(PREDICTIONS)}"
        require(self.prediction in PREDICTIONS, rule, self.prediction)
        rule = f"beta_schedule must be one of {', '.join(BETA_SCHEDULES)}"
        require(self.beta_schedule in BETA_SCHEDULES, rule, self.beta_schedule)
        rule = "beta_start and beta_end must rise within 0 and 1"
        betas = (self.beta_start, self.beta_end)
        require(0 < self.beta_start <= self.beta_end < 1, rule, betas)
        rule = "train_steps must be a positive whole number"
        require(is_whole(self.train_steps, 1), rule, self.train_steps)

    @classmethod
    def of(cls, model: Any, scheduler: Any) -> Self:
        """The loss of a denoiser and a scheduler of diffusers: `pipeline.unet`,
        `pipeline.scheduler`.

        Raises:
            InputError: for a class or a scheduler that is not known.
        """
        config = {**scheduler.config, "_class_name": type(scheduler).__name__}
        return cls(type(model).__name__, **schedule_options(config))

    def __call__(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        import torch

        latents, noise, timesteps = batch["latents"], batch["noise"], batch["timesteps"]
        kept, added = self.shares(timesteps, latents)
        noisy = kept * latents + added * noise
        predicted = DENOISERS[self.denoiser].ask(model, noisy, timesteps, batch)

        targets = {
            "epsilon": noise,
            "v_prediction": kept * noise - added * latents,
            "sample": latents,
            "flow": noise - latents,
        }
        target = targets[self.prediction]
        return torch.nn.functional.mse_loss(predicted.float(), target.float())

    def shares(
        self, timesteps: torch.Tensor, latents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the latents and what the noise are multiplied by, to be broadcast over the latents."""
        if self.prediction == "flow":
            added = timesteps.to(latents.dtype) / TRAIN_STEPS
            kept = 1 - added
        else:
            remaining = self._remaining(timesteps.device)[timesteps].to(latents.dtype)
            kept = remaining.sqrt()
            added = (1 - remaining).sqrt()
        shape = (-1, *[1] * (latents.dim() - 1))
        return kept.view(shape), added.view(shape)

    def _remaining(self, device: torch.device) -> torch.Tensor:
        """What is left of a picture's variance after each timestep, [train_steps]."""
        import torch

        steps = self.train_steps
        if self.beta_schedule == "squaredcos_cap_v2":  # arXiv:2102.09672, equation 17
            times = torch.arange(steps + 1, device=device, dtype=torch.float64) / steps
            shares = ((times + 0.008) / 1.008 * torch.pi / 2).cos() ** 2
            betas = (1 - shares[1:] / shares[:-1]).clamp(max=0.999).float()
        elif self.beta_schedule == "scaled_linear":
            ends = self.beta_start**0.5, self.beta_end**0.5
            betas = torch.linspace(*ends, steps, device=device, dtype=torch.float32) ** 2
        else:
            ends = self.beta_start, self.beta_end
            betas = torch.linspace(*ends, steps, device=device, dtype=torch.float32)
        return (1 - betas).cumprod(dim=0)


def schedule_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the loss that a scheduler's config says.

    Raises:
        InputError: for one whose noise is none of PREDICTIONS, or added by a schedule that is not
            known.
    """
    kind = str(config.get("_class_name", ""))
    by_flow = kind.startswith("FlowMatch") or config.get("use_flow_sigmas")
    if by_flow or config.get("prediction_type") == "flow_prediction":
        return {"prediction": "flow"}

    names = {
        "prediction": "prediction_type",
        "beta_start": "beta_start",
        "beta_end": "beta_end",
        "beta_schedule": "beta_schedule",
        "train_steps": "num_train_timesteps",
    }
    options = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    lacking = [theirs for ours, theirs in names.items() if ours not in options]
    if config.get("trained_betas") is not None or config.get("rescale_betas_zero_snr"):
        message = f"the noise of the scheduler {kind} is not added by a schedule that is known."
        raise InputError(message, "Give a loss of your own: autofit.fit(model, loader, loss=...).")
    if lacking:
        raise InputError(f"the config of the scheduler lacks {lacking[0]}.", "Correct it.")
    return options
