"""Scores: the accuracy of classifiers, and the quality of generated images."""

from lineardiff.evaluate.accuracy import accuracy, predict
from lineardiff.evaluate.feature_statistics import FeatureStatistics, load_statistics, save_statistics
from lineardiff.evaluate.features import FeatureExtractor, Features, InceptionFeatures, Lite0Features
from lineardiff.evaluate.frechet import Gaussian, GaussianFit, frechet_distance
from lineardiff.evaluate.generation_metrics import generation_scores, inception_score, precision_recall
from lineardiff.evaluate.image_batches import (
    ImageBatches,
    TensorBatches,
    open_batches,
    save_samples,
)
from lineardiff.evaluate.image_features import ImageFeatures, extract, read_reference
from lineardiff.evaluate.paired import agreement, paired_difference
