"""Data sources, timm's image transforms, and the order in which training visits images."""

from lineardiff.data.images import ImageSplit, check_same_classes, open_folder, open_images, subset
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
    "open_folder",
    "open_images",
    "steps_per_epoch",
    "subset",
    "train_transform",
]
