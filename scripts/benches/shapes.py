"""The model that compute is measured with: d = 512, T = 256, K = 8."""

from subnet.config import AuditConfig, DeadlineConfig, ModelConfig, RunConfig, TrainingConfig


def training_config(
    *, num_layers: int, microbatch_size: int, accumulate: int, checkpoint_every: int, num_stages: int = 3
) -> RunConfig:
    """One decoder layer or more for each stage; an epoch longer than any measurement."""
    return RunConfig(
        model=ModelConfig(
            width=512, num_layers=num_layers, num_heads=8, num_kv_heads=8, ffn_width=1408, bottleneck_width=8
        ),
        training=TrainingConfig(
            num_stages=num_stages,
            microbatch_size=microbatch_size,
            num_tokens=256,
            accumulate=accumulate,
            max_in_flight=2 * num_stages,
            min_miners=num_stages,
            target_batches=1_000_000,
        ),
        audit=AuditConfig(checkpoint_every=checkpoint_every),
        deadlines=DeadlineConfig(gathering_s=600, training_s=36000, sample_s=600, silent_s=60),
    )
