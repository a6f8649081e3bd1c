"""A recipe of generation for runs of seconds."""

from dataclasses import replace

from lineardiff.recipes import fashion_sit

TINY_SIT = replace(
    fashion_sit(),
    name="tiny_sit",
    model_args=("dim=32", "depth=2", "num_heads=2", "patch_size=7"),
    epochs=2,
    batch_size=16,
    accumulate=2,
    hflip=0.5,
    train_limit=96,
    validation_limit=24,
    warmup_epochs=0.0,
    grid_images=4,
    grid_steps=2,
    workers=0,
    log_every=5,
    checkpoint_every=4,
)  # 6 updates an epoch, 12 in all; rows, epochs and checkpoints never fall on the same update
