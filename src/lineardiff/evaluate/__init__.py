"""Scores: the accuracy of classifiers, and the quality of generated images."""

from lineardiff.evaluate.accuracy import accuracy, agreement, paired_difference, predict
from lineardiff.evaluate.features import FeatureExtractor, Features, InceptionFeatures, Lite0Features
from lineardiff.evaluate.frechet import (
    FeatureStatistics,
    Gaussian,
    GaussianFit,
    frechet_distance,
    load_statistics,
    save_statistics,
)
from lineardiff.evaluate.image_batches import ImageBatches, TensorBatches, open_batches, save_samples
from lineardiff.evaluate.scores import (
    ImageFeatures,
    extract,
    generation_scores,
    inception_score,
    precision_recall,
    read_reference,
)

__all__ = [
    "FeatureExtractor",
    "FeatureStatistics",
    "Features",
    "Gaussian",
    "GaussianFit",
    "ImageBatches",
    "ImageFeatures",
    "InceptionFeatures",
    "Lite0Features",
    "TensorBatches",
    "accuracy",
    "agreement",
    "extract",
    "frechet_distance",
    "generation_scores",
    "inception_score",
    "load_statistics",
    "open_batches",
    "paired_difference",
    "precision_recall",
    "predict",
    "read_reference",
    "save_samples",
    "save_statistics",
]
