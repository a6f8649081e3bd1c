"""What a model is worth: accuracy, size and cost, speed; and what its generated images are worth."""

from lineardiff.evaluate.accuracy import accuracy, predict
from lineardiff.evaluate.attention_candidates import Candidate, Shape, layer_candidates, op_candidates
from lineardiff.evaluate.attention_rows import Crossover, Row, crossover
from lineardiff.evaluate.attention_speed import Limits, measure_attention
from lineardiff.evaluate.environment import environment
from lineardiff.evaluate.feature_statistics import FeatureStatistics, load_statistics, save_statistics
from lineardiff.evaluate.features import FeatureExtractor, Features, InceptionFeatures, Lite0Features
from lineardiff.evaluate.flops import multiply_adds, parameters
from lineardiff.evaluate.frechet import Gaussian, GaussianFit, frechet_distance
from lineardiff.evaluate.generation_metrics import generation_scores, inception_score, precision_recall
from lineardiff.evaluate.image_batches import (
    ImageBatches,
    TensorBatches,
    open_batches,
    save_samples,
)
from lineardiff.evaluate.image_features import ImageFeatures, extract, read_reference
from lineardiff.evaluate.memory import peak_memory
from lineardiff.evaluate.paired import agreement, paired_difference
from lineardiff.evaluate.speed import Speed, images_per_second
from lineardiff.evaluate.timing import Timing, interleaved
