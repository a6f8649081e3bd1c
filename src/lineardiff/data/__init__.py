"""From a name or a path to batches: data sources, timm's transforms, and stateless sampling."""

from lineardiff.data.images import ImageSplit, check_same_classes, open_images, subset
from lineardiff.data.sampling import Augmented, EpochBatches, Transformed, drop_bad, steps_per_epoch
from lineardiff.data.transforms import Transform, center_crop, eval_transform, train_transform

__all__ = [
    "Augmented",
    "EpochBatches",
    "ImageSplit",
    "Transform",
    "Transformed",
    "center_crop",
    "check_same_classes",
    "drop_bad",
    "eval_transform",
    "open_images",
    "steps_per_epoch",
    "subset",
    "train_transform",
]
