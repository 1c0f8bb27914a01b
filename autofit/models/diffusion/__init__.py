"""Models of diffusers: the denoiser of a pipeline as a workload, with latents that stand for its
data."""
