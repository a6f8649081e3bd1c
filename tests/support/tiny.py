"""Words of `lineardiff train` for a run of seconds, shared by the tests of this folder."""

TINY = [
    "demo",
    *("--model", "vit_tiny_patch16_224"),
    *("--model-args", "img_size=16", "patch_size=8", "embed_dim=16", "depth=1", "num_heads=1"),
    *("--image-size", "16"),
    *("--train-limit", "40"),
    *("--batch-size", "8"),
    *("--epochs", "2"),
    *("--log-every", "5"),
    *("--workers", "0"),
]
